# mypy: disallow-untyped-defs=False
"""A grouped matmul in Triton as servers have it: the slots of each expert are padded to whole tiles on the
host's side of the launch, a program has a tile of one expert, and rows are gathered through pointers.

Protocol: `aligned(experts, count, rows)` is that padding: slots by tile (those beyond an expert's last are
the number of slots), and the expert of each tile. Gate and up are columns of one result: their activation is
a kernel of its own, which is not counted here.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl


@dataclass(frozen=True)
class Tile:
    """Rows, columns and K of a tile, warps, stages, tiles of rows that are computed together."""
    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int

    def __str__(self) -> str: return f"{self.m}x{self.n}x{self.k}, {self.warps} warps, {self.stages} stages"


@triton.jit
def grouped(x, w, out, weights, slots, experts, N, K, SLOTS, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr):
    """A tile. K is a multiple of the tile's, N of its columns."""
    tile = tl.program_id(0)
    columns = tl.cdiv(N, BN)
    first = tile // (GROUP * columns) * GROUP
    height = min(TILES - first, GROUP)
    row = first + tile % (GROUP * columns) % height
    column = tile % (GROUP * columns) // height
    own = tl.load(slots + row * BM + tl.arange(0, BM))
    inside = own < SLOTS
    expert = tl.load(experts + row).to(tl.int64)
    n, k = column * BN + tl.arange(0, BN), tl.arange(0, BK)
    a_at = x + (own // TOP_K)[:, None] * K + k[None, :]
    b_at = w + expert * N * K + n[None, :] * K + k[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(0, tl.cdiv(K, BK)):
        left = tl.load(a_at, mask=inside[:, None], other=0)
        acc = tl.dot(left, tl.load(b_at), acc)
        a_at += BK
        b_at += BK
    if WEIGHTED: acc = acc * tl.load(weights + own, mask=inside, other=0)[:, None]
    tl.store(out + own[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=inside[:, None])


def aligned(experts: np.ndarray, count: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the experts of all slots."""
    slots, of_tile = [], []
    for expert in range(count):
        own = np.flatnonzero(experts == expert)
        tiles = -(-len(own) // rows)
        slots.append(np.pad(own, (0, tiles * rows - len(own)), constant_values=len(experts)))
        of_tile += [expert] * tiles
    return np.concatenate(slots).astype(np.int32), np.array(of_tile, np.int32)
