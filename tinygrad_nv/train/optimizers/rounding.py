"""Stochastic rounding to bfloat16 from a counter: the same bits for the same seed, step and element.

Protocol. `rounded(x, seed, step, number)` adds 16 random bits below the last kept one and cuts: a number is
rounded up as often as it lies near the upper one, so that the mean of many roundings is the number (Gupta et
al., arXiv 1502.02551). Random bits are Philox4x32-10 (tile/attention/dropout.py) with

    key        seed, two u32
    counter    (element // 8, parameter's number, step, 0)
    bits       element % 8: the half element % 2, lower first, of word element % 8 // 2

so that a call serves 8 elements that lie side by side. NaN and infinities stay what they are.
"""
from __future__ import annotations

from tinygrad import Tensor, dtypes

from tinygrad_nv.tile.attention.dropout import philox

RUN = 8     # elements of a call


def round_to(x: Tensor, seed: Tensor, step: Tensor, number: int) -> Tensor:
    """x, float32, as bfloat16. seed u32 (2); step int32 (1); `number` is the parameter's."""
    bits = x.bitcast(dtypes.uint32)
    there = (bits & 0x7F800000) != 0x7F800000
    noise = _noise(int(x.numel()), seed, step, number).reshape(x.shape).cast(dtypes.uint32)
    moved = ((bits + noise) & 0xFFFF0000).bitcast(dtypes.float32)
    return there.where(moved, x).cast(dtypes.bfloat16)


def _noise(count: int, seed: Tensor, step: Tensor, number: int) -> Tensor:
    """16 random bits for each element, as u64."""
    wide = dtypes.uint64
    calls = Tensor.arange(-(-count // RUN), dtype=wide).to(seed.device)
    key = [seed[i:i + 1].cast(wide) for i in range(2)]
    words = philox((calls, calls * 0 + number, calls * 0 + step.cast(wide), calls * 0), key)
    halves = [word >> 16 * half & 0xFFFF for word in words for half in range(2)]
    return Tensor.stack(*halves, dim=1).reshape(-1)[:count]
