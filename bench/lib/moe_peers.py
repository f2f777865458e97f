# mypy: disallow-untyped-defs=False
"""Grouped matmuls in Triton as servers have them: the slots of each expert are padded to whole tiles on the
host's side of the launch, a program has a tile of one expert, and rows are gathered through pointers.

Protocol: `align_experts(experts, count, rows)` is that padding: slots by tile (those beyond an expert's last
are the number of slots), and the expert of each tile. Gate and up are columns of one result: their activation
is a kernel of its own, which is not counted here.

`expert_matmul` is of floats. `expert_int4` has two codes a byte along K, a scale for each `GROUP_K` of them,
and makes operands in registers, as vLLM's kernel for GPTQ and AWQ; `expert_mxfp4` leaves that to
tl.dot_scaled.
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
def expert_matmul(x, w, out, weights, slots, experts, N, K, SLOTS, TOP_K: tl.constexpr,
                  WEIGHTED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                  GROUP: tl.constexpr, TILES: tl.constexpr):
    """A tile. K is a multiple of the tile's, N of its columns."""
    own, expert, n = _place(slots, experts, N, BM, BN, GROUP, TILES)
    inside, k = own < SLOTS, tl.arange(0, BK)
    a_at = x + (own // TOP_K)[:, None] * K + k[None, :]
    b_at = w + expert * N * K + n[None, :] * K + k[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(0, tl.cdiv(K, BK)):
        left = tl.load(a_at, mask=inside[:, None], other=0)
        acc = tl.dot(left, tl.load(b_at), acc)
        a_at += BK
        b_at += BK
    _store(out, acc, own, inside, n, weights, N, WEIGHTED)


@triton.jit
def _place(slots, experts, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr):
    """The slots of a program's tile, its expert and its columns."""
    tile = tl.program_id(0)
    columns = tl.cdiv(N, BN)
    first = tile // (GROUP * columns) * GROUP
    height = min(TILES - first, GROUP)
    row = first + tile % (GROUP * columns) % height
    column = tile % (GROUP * columns) // height
    own = tl.load(slots + row * BM + tl.arange(0, BM))
    return own, tl.load(experts + row).to(tl.int64), column * BN + tl.arange(0, BN)


@triton.jit
def _store(out, acc, own, inside, n, weights, N, WEIGHTED: tl.constexpr):
    if WEIGHTED: acc = acc * tl.load(weights + own, mask=inside, other=0)[:, None]
    tl.store(out + own[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def expert_int4(x, w, scales, out, weights, slots, experts, N, K, SLOTS, TOP_K: tl.constexpr,
                WEIGHTED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                GROUP: tl.constexpr, TILES: tl.constexpr, GROUP_K: tl.constexpr):
    """Codes that are stored 8 larger."""
    own, expert, n = _place(slots, experts, N, BM, BN, GROUP, TILES)
    inside, k = own < SLOTS, tl.arange(0, BK)
    a_at = x + (own // TOP_K)[:, None] * K + k[None, :]
    b_at = w + expert * N * (K // 2) + n[None, :] * (K // 2) + k[:, None] // 2
    s_at = scales + expert * N * (K // GROUP_K) + n[None, :] * (K // GROUP_K)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for i in range(0, tl.cdiv(K, BK)):
        left = tl.load(a_at, mask=inside[:, None], other=0)
        code = (tl.load(b_at) >> (k[:, None] % 2 * 4)) & 0xF
        scale = tl.load(s_at + (k[:, None] + i * BK) // GROUP_K).to(tl.float32)
        acc = tl.dot(left, ((code.to(tl.float32) - 8) * scale).to(left.dtype), acc)
        a_at += BK
        b_at += BK // 2
    _store(out, acc, own, inside, n, weights, N, WEIGHTED)


@triton.jit
def expert_mxfp4(x, w, scales, out, weights, slots, experts, N, K, SLOTS, TOP_K: tl.constexpr,
                 WEIGHTED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 GROUP: tl.constexpr, TILES: tl.constexpr):
    """A scale of E8M0 for each 32 of K."""
    own, expert, n = _place(slots, experts, N, BM, BN, GROUP, TILES)
    inside, k = own < SLOTS, tl.arange(0, BK)
    a_at = x + (own // TOP_K)[:, None] * K + k[None, :]
    b_at = w + expert * N * (K // 2) + n[None, :] * (K // 2) + tl.arange(0, BK // 2)[:, None]
    s_at = scales + expert * N * (K // 32) + n[:, None] * (K // 32) + tl.arange(0, BK // 32)[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(0, tl.cdiv(K, BK)):
        left = tl.load(a_at, mask=inside[:, None], other=0)
        acc = tl.dot_scaled(left, None, "bf16", tl.load(b_at), tl.load(s_at), "e2m1", acc)
        a_at += BK
        b_at += BK // 2
        s_at += BK // 32
    _store(out, acc, own, inside, n, weights, N, WEIGHTED)


def align_experts(experts: np.ndarray, count: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Aligns the experts of all slots."""
    slots, of_tile = [], []
    for expert in range(count):
        own = np.flatnonzero(experts == expert)
        tiles = -(-len(own) // rows)
        slots.append(np.pad(own, (0, tiles * rows - len(own)), constant_values=len(experts)))
        of_tile += [expert] * tiles
    return np.concatenate(slots).astype(np.int32), np.array(of_tile, np.int32)
