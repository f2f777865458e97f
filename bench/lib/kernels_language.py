"""Kernels in the tile language that benchmarks time, beside those of tinygrad_nv.stdlib."""
from __future__ import annotations

from typing import Any

from tinygrad_nv import tile
from tinygrad_nv.language.decorator import kernel
from tinygrad_nv.shapes import KTile, OTile
from tinygrad_nv.tile.language.names import f32


@kernel
def matmul(a: KTile["M", "K"], b: KTile["K", "N"]) -> OTile["M", "N", f32]:
    """a @ b, of any dtype of floats."""
    T = tile.context()
    acc: Any = tile.zeros((T.m, T.n), f32)
    for k in tile.range_k(a.shape, T.k): acc = tile.dot(a[T.m, k], b[k, T.n], acc)
    return acc
