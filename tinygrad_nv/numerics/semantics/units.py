"""Dot products as units compute them: D = A B + C, from codes, in the unit's own order of sums.

Protocol: `dot(unit, a, b, c)` takes codes a (…, M, K), b (…, K, N) and c (…, M, N) in the unit's formats, and
gives codes (…, M, N) of its accumulator. K is a multiple of the unit's K: the unit is applied to one chunk
after the other, each starting from the last one's result. Integers are plain int64 arrays.

    TensorCore   steps of `step` elements. A step takes the accumulator and its products, exact; a product's
                 exponent is the sum of its factors', not renormalised, where a subnormal number has the least
                 exponent of its format; a product of zero has none, and an accumulator of zero -126. All are
                 aligned to the largest exponent, cut toward zero after `bits` fractional bits, summed
                 exactly, and the sum is rounded: to f32 toward zero with `keep` bits of mantissa, to f16 to
                 nearest even. Infinity and NaN are those of the exact sum. Known by measurement alone:
                 MMA-Sim, arXiv 2511.10909. Its authors say of zeros that they are not finished
    EightsOnHopper  mma.sync of FP8 on sm_90: float16 tensor cores twice, from zero, over the elements whose
                 place mod 4 is 0, 1, then 2, 3; C is added to that by one addition (read from SASS)
    Tile         TDPBF16PS of AMX: chains of FMAs over even and odd elements, from zero; their sum; that and
                 C. Subnormal numbers are zeros at every step (Intel SDM, volume 2)
    Pairs        VDPBF16PS: FMA of each pair's odd element, then of the even one, onto C, subnormal numbers
                 zeros (Intel SDM, volume 2), with `flush` False what stands for it in plain C
    Chain        one FMA after the other in the order of k: plain C, FFMA of CUDA cores
    Bytes        integers: exact; int32 wraps, or saturates (dp4a, VPDPBUSD, TDPBSSD, mma and wgmma s8)

Sums of FP8 on Hopper, promoted: tensor cores keep few digits, so they sum short stretches alone.
A wgmma of FP8 keeps 13 bits of mantissa of each sum. Over K elements the error grows with K:
DeepSeek-V3 (arXiv 2412.19437, 3.3.2) saw about 2 % at K = 4096. Two levels bound it: tensor cores sum
`every` elements from zero, and CUDA cores add that, times the scale of its block, to a float32 accumulator by
one FMA.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tinygrad_nv.numerics.semantics import exact
from tinygrad_nv.numerics.semantics.formats import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    FORMATS,
    TF32,
    Codes,
    Format,
    Values,
    decode,
    encode,
    flush_subnormals,
)

ZERO_EXPONENT, LEAST_EXPONENT = -400, -126      # of a factor, and of an accumulator
ROWS = 64       # of A at a time: products of … x 64 x K x N are held
PROMOTE_EVERY = 128     # elements between promotions, DeepSeek-V3's: the length of a block with one scale


@dataclass(frozen=True)
class TensorCore:
    """Truncating sums; `keep`: bits of mantissa of a float32 result."""
    a: Format
    b: Format
    result: Format
    k: int
    step: int
    bits: int
    keep: int = 23


@dataclass(frozen=True)
class EightsOnHopper:
    """mma.sync of FP8 on sm_90, by float16 tensor cores."""
    a: Format
    b: Format
    result: Format
    k: int


@dataclass(frozen=True)
class Tile:
    """TDPBF16PS."""
    k: int = 32
    a: Format = BF16
    b: Format = BF16
    result: Format = F32


@dataclass(frozen=True)
class Pairs:
    """VDPBF16PS, or two FMAs."""
    flush: bool = True
    k: int = 2
    a: Format = BF16
    b: Format = BF16
    result: Format = F32


@dataclass(frozen=True)
class Chain:
    """FMAs in the order of k."""
    a: Format = F32
    b: Format = F32
    result: Format = F32
    k: int = 1


@dataclass(frozen=True)
class Bytes:
    """Sums of integers in int32."""
    saturate: bool = False
    k: int = 4


Unit: TypeAlias = TensorCore | EightsOnHopper | Tile | Pairs | Chain | Bytes
EIGHTS = (E4M3, E5M2)


def tensor_core(arch: str, instruction: str, a: str, result: str = "f32", b: str = "",
                k: int = 0) -> TensorCore | EightsOnHopper:
    """The unit of `mma` or `wgmma` on sm_80, sm_89 or sm_90a, for A's format, B's where it is another, and
    the accumulator's. `k`: elements of an instruction, 256 bits of A by default."""
    assert instruction in ("mma", "wgmma"), instruction
    left, right, to = FORMATS[a], FORMATS[b or a], FORMATS[result]
    eight, hopper = left in EIGHTS, arch.startswith("sm_90")
    k = k or 256 // left.bits
    narrow = 13 if to == F32 else 23
    if instruction == "wgmma":
        return TensorCore(left, right, to, k, k, *((13, narrow) if eight else (25, 23)))
    if hopper: return EightsOnHopper(left, right, to, k) if eight else TensorCore(left, right, to, k, k, 25)
    step = min(k, 16 if eight else 4 if left == TF32 else 8)
    return TensorCore(left, right, to, k, step, *((13, narrow) if eight else (24, 23)))


def dot(unit: Unit, a: Codes, b: Codes, c: Codes) -> npt.NDArray[Any]:
    """D = A B + C in codes; see above."""
    assert a.shape[-1] == b.shape[-2], "A's columns are B's rows"
    assert a.shape[-1] % unit.k == 0, f"K is a multiple of {unit.k}"
    if isinstance(unit, Bytes): return _bytes(unit, a, b, c)
    compute = {TensorCore: _truncating, EightsOnHopper: _eights, Tile: _tile, Pairs: _pairs,
               Chain: _chain}[type(unit)]
    out = np.empty(c.shape, unit.result.kind)
    for m in range(0, a.shape[-2], ROWS):
        rows, sums = a[..., m:m + ROWS, :], c[..., m:m + ROWS, :]
        for k in range(0, a.shape[-1], unit.k):
            sums = compute(unit, *_chunk(rows, b, slice(k, k + unit.k)), sums)  # type: ignore[operator]
        out[..., m:m + ROWS, :] = sums
    return out


def _chunk(a: Codes, b: Codes, which: slice) -> tuple[Codes, Codes]:
    """Elements of K."""
    return a[..., which], b[..., which, :]


def _products(left: Values, right: Values) -> Values:
    """(…, M, K, N)."""
    return left[..., None] * right[..., None, :, :]


# **** tensor cores ****

def _exponents(codes: Codes, of: Format) -> npt.NDArray[np.int32]:
    """The exponents that alignment goes by."""
    values = decode(codes, of)
    values = np.where(np.isfinite(values), values, 0.0)
    found = np.maximum(np.frexp(values)[1] - 1, of.least)
    return np.where(values == 0, ZERO_EXPONENT, found).astype(np.int32)


def _truncating(unit: TensorCore, a: Codes, b: Codes, c: Codes) -> Codes:
    """One instruction: its steps one after the other."""
    for k in range(0, a.shape[-1], unit.step):
        left, right = _chunk(a, b, slice(k, k + unit.step))
        special = _special(unit, left, right, c)
        after = _step(unit, left, right, c)
        c = np.where(np.isfinite(special), after, encode(special, unit.result)).astype(unit.result.kind)
    return c


def _special(unit: TensorCore, a: Codes, b: Codes, c: Codes) -> Values:
    """The plain sum, which is right where it is infinite or NaN."""
    with np.errstate(invalid="ignore"):
        products = _products(decode(a, unit.a), decode(b, unit.b))
        return np.asarray(decode(c, unit.result) + products.sum(-2))


def _step(unit: TensorCore, a: Codes, b: Codes, c: Codes) -> Codes:
    """Aligns, cuts, sums and rounds. Infinities and NaN come out as anything."""
    def finite(values: Values) -> Values: return np.where(np.isfinite(values), values, 0.0)
    products = _products(finite(decode(a, unit.a)), finite(decode(b, unit.b)))
    powers = _exponents(a, unit.a)[..., None] + _exponents(b, unit.b)[..., None, :, :]
    top = np.maximum(powers.max(-2), np.maximum(_exponents(c, unit.result), LEAST_EXPONENT))
    total = np.trunc(np.ldexp(products, unit.bits - top[..., None, :])).sum(-2)
    total += np.trunc(np.ldexp(finite(decode(c, unit.result)), unit.bits - top))
    return _round(unit, np.ldexp(total, top - unit.bits))


def _round(unit: TensorCore, total: Values) -> Codes:
    """A sum as accumulator. Toward zero, but from 2^128 on infinity; an exact zero has no sign."""
    total = np.where(total == 0, 0.0, total)
    if unit.result == F16: return encode(total, F16, "rn")
    codes = encode(total, F32, "rz") & np.uint32(~0 << (23 - unit.keep) & 0xffffffff)
    return np.where(np.abs(total) >= 2.0 ** 128, encode(np.copysign(np.inf, total), F32), codes)


def _eights(unit: EightsOnHopper, a: Codes, b: Codes, c: Codes) -> Codes:
    """Two float16 instructions of half the elements each, from zero, and an addition."""
    half = TensorCore(F16, F16, unit.result, unit.k // 2, unit.k // 2, 25)
    left, right = encode(decode(a, unit.a), F16), encode(decode(b, unit.b), F16)
    place, sums = np.arange(unit.k) % 4, np.zeros(c.shape, unit.result.kind)
    for chosen in (place < 2, place >= 2):
        sums = _truncating(half, left[..., chosen], right[..., chosen, :], sums)
    return encode(exact.add(decode(c, unit.result), decode(sums, unit.result)), unit.result)


# **** CPUs ****

def _tile(unit: Tile, a: Codes, b: Codes, c: Codes) -> Codes:
    """Chains of even and of odd elements from zero, then C and their sum."""
    sums = [_flushing_chain(*_chunk(a, b, slice(i, None, 2)), np.zeros(c.shape, np.uint32)) for i in range(2)]
    both = _flushing_sum(sums[0], sums[1])
    return _flushing_sum(flush_subnormals(c, F32), both)


def _pairs(unit: Pairs, a: Codes, b: Codes, c: Codes) -> Codes:
    backwards = _chunk(a, b, slice(None, None, -1))
    if unit.flush: return _flushing_chain(*backwards, flush_subnormals(c, F32))
    return _chain(Chain(BF16, BF16), *backwards, c)


def _flushing_sum(a: Codes, b: Codes) -> Codes:
    return flush_subnormals(encode(exact.add(decode(a, F32), decode(b, F32)), F32), F32)


def _flushing_chain(a: Codes, b: Codes, c: Codes) -> Codes:
    left, right = decode(flush_subnormals(a, BF16), BF16), decode(flush_subnormals(b, BF16), BF16)
    for k in range(a.shape[-1]): c = flush_subnormals(_fma(left[..., k], right[..., k, :], c, F32), F32)
    return c


def _chain(unit: Chain, a: Codes, b: Codes, c: Codes) -> Codes:
    left, right = decode(a, unit.a), decode(b, unit.b)
    for k in range(a.shape[-1]): c = _fma(left[..., k], right[..., k, :], c, unit.result)
    return c


def _fma(a: Values, b: Values, c: Codes, to: Format) -> Codes:
    return encode(exact.fma(a[..., None], b[..., None, :], decode(c, to)), to)


# **** integers ****

def _bytes(unit: Bytes, a: Codes, b: Codes, c: Codes) -> npt.NDArray[np.int32]:
    """A chunk after the other: saturation is of each instruction's result."""
    total, low, high = c.astype(np.int64), -2 ** 31, 2 ** 31
    for k in range(0, a.shape[-1], unit.k):
        left, right = _chunk(a, b, slice(k, k + unit.k))
        total = total + left.astype(np.int64) @ right.astype(np.int64)
        total = np.clip(total, low, high - 1) if unit.saturate else (total - low) % (high - low) + low
    return total.astype(np.int32)


def promote_dot(unit: Unit, a: Codes, b: Codes, scales: Values | None = None,
                every: int = PROMOTE_EVERY) -> Codes:
    """A (M, K) B (K, N) as float32 codes: `unit` from zero for each `every` elements, then one FMA with the
    scale of the block, float32 values (K / every, M, N), 1 by default."""
    total = np.zeros((a.shape[0], b.shape[1]), np.uint32)
    for number, k in enumerate(range(0, a.shape[1], every)):
        part = dot(unit, a[:, k:k + every], b[k:k + every], np.zeros_like(total))
        scale = np.ones(total.shape) if scales is None else scales[number]
        total = encode(exact.fma(decode(part, F32), scale, decode(total, F32)), F32)
    return total
