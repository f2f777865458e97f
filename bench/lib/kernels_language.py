"""Kernels in the tile language that benchmarks time, beside those of tinygrad_nv.stdlib: matmuls, norms and
softmax, matmuls with 4-bit codes, and the gradients of attention in one kernel.

Protocol: norms give their operands' dtype, as memory_peers.py's in Triton. Codes of 4 bits are 0 to 15 for -8
to 7, eight along K in a word of 32 bits: even ones in the lower half, odd ones in the upper, so that two are
the last bits of two float16 between 1024 and 2048 at once. A scale is for a group of K and a column.
"""
from __future__ import annotations

from typing import Any

from tinygrad_nv import tile
from tinygrad_nv.language.decorator import kernel
from tinygrad_nv.shapes import KTile, OTile
from tinygrad_nv.stdlib.attention import LOG2E
from tinygrad_nv.tile.language.names import f16, f32, int32


@kernel
def matmul(a: KTile["M", "K"], b: KTile["K", "N"]) -> OTile["M", "N", f32]:
    """a @ b, of any dtype of floats."""
    T = tile.context()
    acc: Any = tile.zeros((T.m, T.n), f32)
    for k in tile.range_k(a.shape, T.k): acc = tile.dot(a[T.m, k], b[k, T.n], acc)
    return acc


@kernel
def matmul_nt(a: KTile["M", "K"], b: KTile["N", "K"]) -> OTile["M", "N", f32]:
    """a bᵀ, of any dtype of floats."""
    T = tile.context()
    acc: Any = tile.zeros((T.m, T.n), f32)
    for k in tile.range_k(a.shape, T.k): acc = tile.dot(a[T.m, k], b[T.n, k].T, acc)
    return acc


@kernel
def rms_norm(x: KTile["R", "N"], w: KTile["N"], *, eps: float) -> Any:
    """x / √(mean x² + eps) · w of each row."""
    T = tile.context()
    row = tile.cast(tile.load(x, T.m, T.d), f32)
    scale = tile.rsqrt(tile.sum(row * row, 1) * (1 / x.shape[1]) + eps)
    return tile.cast(row * scale[:, None], x.dtype) * w[:][None, :]


@kernel
def layer_norm(x: KTile["R", "N"], w: KTile["N"], b: KTile["N"], *, eps: float) -> Any:
    """Normalises each row, with weight and bias."""
    T = tile.context()
    row = tile.cast(tile.load(x, T.m, T.d), f32)
    centred = row - (tile.sum(row, 1) * (1 / x.shape[1]))[:, None]
    scale = tile.rsqrt(tile.sum(centred * centred, 1) * (1 / x.shape[1]) + eps)
    return tile.cast(centred * scale[:, None], x.dtype) * w[:][None, :] + b[:][None, :]


@kernel
def softmax(x: KTile["R", "N"]) -> Any:
    """Computes the softmax of each row."""
    T = tile.context()
    return tile.cast(tile.softmax(tile.cast(tile.load(x, T.m, T.d), f32), 1), x.dtype)


def dequantise(words: Any, scale: Any) -> Any:
    """Numbers (n, 8 k) of words (n, k), times a scale for each n: 0x6400 is 1024, whose last bit is 1."""
    n, count = words.shape
    pairs = (words[:, :, None] >> (tile.arange(4) * 4)[None, None, :]) & 0x000F000F | 0x64006400
    return (tile.bitcast(pairs, f16).reshape(n, 8 * count) - 1032.0) * scale[:, None]


@kernel
def w4a16(x: KTile["M", "K", f16], packed: KTile["N", "K//8", int32], scales: KTile["K//group", "N", f16], *,
          group: int) -> OTile["M", "N", f16]:
    """x wᵀ of the matrix w that codes and scales stand for. Words of the next block of K are loaded while
    this one is multiplied."""
    T = tile.context()
    count, step = int(T.k) // 8, int(T.k)
    acc: Any = tile.zeros((T.m, T.n), f32)
    words, scale = packed[T.n, tile.block(0, count)], scales[0, T.n]
    for block in tile.range_k(x.shape, T.k):
        after = packed[T.n, tile.block(block.start // 8 + count, count)]
        scale_after = scales[(block.start + step) // group, T.n]
        acc = tile.dot(x[T.m, block], dequantise(words, scale).T, acc)
        words, scale = after, scale_after
    return tile.cast(acc, f16)


@kernel(grid=lambda M, N, BM, BN, split: (-(-M // BM), -(-N // BN), split))
def w4a16_split(x: KTile["M", "K", f16], packed: KTile["N", "K//8", int32],
                scales: KTile["K//group", "N", f16],
                out: OTile["M", "N", f32], *, group: int, split: int, BM: int, BN: int, BK: int) -> None:
    """The same in float32 for few rows, each program with a part of K: sums are added to `out`."""
    m, n = tile.block(tile.program_id(0) * BM, BM), tile.block(tile.program_id(1) * BN, BN)
    part, count = x.shape[1] // split, BK // 8
    begin = tile.program_id(2) * part
    acc: Any = tile.zeros((BM, BN), f32)
    words, scale = packed[n, tile.block(begin // 8, count)], scales[begin // group, n]
    for start in tile.range(begin, begin + part, BK):
        after = packed[n, tile.block(start // 8 + count, count)]
        scale_after = scales[(start + BK) // group, n]
        acc = tile.dot(x[m, tile.block(start, BK)], dequantise(words, scale).T, acc)
        words, scale = after, scale_after
    tile.atomic_add(out, acc, m, n)


@kernel
def attention_gradient(k: KTile["B", "G", "T", "D"], v: KTile["B", "G", "T", "D"],
                       q: KTile["B", "H", "S", "D"], do: KTile["B", "H", "S", "D"],
                       lse: KTile["B", "H", "S", f32], delta: KTile["B", "H", "S", f32],
                       dv: OTile["B", "G", "T", "D", f32], dq: OTile["B", "H", "S", "D", f32], *,
                       scale: float) -> Any:
    """dk in float32, dv, and dq, which is added to zeros that are there: the gradients of attention in one
    kernel, as our template has them. The bits of dq depend on the order of programs."""
    T = tile.context()
    groups, heads, factor = k.shape[1], q.shape[1] // k.shape[1], scale * LOG2E
    batch, group = T.batch // groups, T.batch % groups
    keys, values = tile.load(k, T.m, T.d), tile.load(v, T.m, T.d)
    dk, total = tile.zeros((T.m, T.d), f32), tile.zeros((T.m, T.d), f32)
    for inner in tile.range(heads):
        head, first = group * heads + inner, tile.block(0, int(T.n))
        row, own = tile.load(lse, batch, head, first), tile.load(delta, batch, head, first)
        for block in tile.range_n(q.shape[2], T.n):
            queries, grad = tile.load(q, batch, head, block, T.d), tile.load(do, batch, head, block, T.d)
            p = tile.exp2_nonpositive(tile.dot(keys, queries.T) * factor - (row * LOG2E)[None, :])
            after = block + int(T.n)
            row_after, own_after = tile.load(lse, batch, head, after), tile.load(delta, batch, head, after)
            total = tile.dot(tile.cast(p, do.dtype), grad, total)
            ds = tile.cast(p * (tile.dot(values, grad.T) - own[None, :]), q.dtype)
            dk = tile.dot(ds, queries, dk)
            tile.atomic_add(dq, tile.dot(ds.T, keys) * scale, batch, head, block, T.d)
            row, own = row_after, own_after
    tile.store(dv, total, T.m, T.d)
    return dk * scale
