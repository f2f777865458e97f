"""Kernels in the tile language in a graph pool: captured for each batch size, replayed with other inputs."""
from __future__ import annotations

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.graphs import GraphPool, Input
from tinygrad_nv.language import KTile, OTile, f32, int32, kernel, tile

WIDTH = 48
RNG = np.random.default_rng(0)


@kernel(grid=lambda B: (B,))
def scaled_rows(x: KTile["B", "W", f32], scale: KTile["B", int32], out: OTile["B", "W", f32]):
    row = tile.program_id(0)
    out[row, :] = x[row, :] * tile.cast(scale[row], f32)


@kernel
def product(a: KTile["M", "K", f32], b: KTile["K", "N", f32]) -> OTile["M", "N", f32]:
    T = tile.context()
    acc = tile.zeros((T.m, T.n), f32)
    for k in tile.range_k(a.shape, T.k): acc = tile.dot(a[T.m, k], b[k, T.n], acc)
    return acc


def test_each_size_and_a_padded_batch():
    weight = RNG.integers(-4, 5, (WIDTH, WIDTH)).astype(np.float32)
    held = Tensor(weight, device="EMU").realize()
    def step(x: Tensor, scale: Tensor) -> Tensor: return product(scaled_rows(x, scale), held)
    pool = GraphPool(step, {"x": Input((WIDTH,), dtypes.float32), "scale": Input((), dtypes.int32, 0)},
                     sizes=(1, 2, 4), device="EMU")
    for batch in (1, 3, 2, 4, 3, 1):
        x = RNG.integers(-4, 5, (batch, WIDTH)).astype(np.float32)
        scale = RNG.integers(1, 9, batch).astype(np.int32)
        np.testing.assert_array_equal(pool(x=x, scale=scale).numpy(), x * scale[:, None] @ weight)
    assert [(each.captures, each.eager) for each in pool.stats().buckets] == [(1, 0)] * 3
    pool.close()
