"""Tensors of training to 8-bit floats: formats, scales, codes, and what the rounding lost.

Protocol. A code stands for value · inverse, of a scale for all of a tensor or for each block of it:

    scale = most / amax        code = nearest(x · scale)        inverse = 1 / scale

`scale_of` is Transformer Engine's compute_scale_from_amax (transformer_engine/common/recipe/
recipe_common.cuh), and `quantised` its cast: to the nearest, ties to even, clamped to ±most. Other than there
infinities are NaN, as NaN is: a clamped infinity would hide that a step went wrong. All is computed in
float32, and bit for bit what IEEE arithmetic gives. Codes are bits in uint8 (tensor.py says why).

`Codes.lost` are, float32 (3): the largest |x|; how many finite x were clamped, x · scale being nearer to a
number beyond ±most; and how many x that are not 0 became 0. Counts are exact up to 2^24.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

FLOAT32_MOST = 3.4028234663852886e38
NAN = 0x7F      # of both formats


@dataclass(frozen=True)
class Format:
    """An 8-bit float: its largest number, its bits of mantissa, and the bias of its exponent."""
    name: str
    dtype: DType
    most: float
    mantissa: int
    bias: int

    @property
    def least(self) -> float:
        """The smallest number that is not subnormal."""
        return 2.0 ** (1 - self.bias)

    @property
    def limit(self) -> float:
        """The largest number that is nearest to `most`: half a step of its exponent above."""
        exponent = int(math.log2(self.most))
        return self.most + 2.0 ** (exponent - self.mantissa - 1)

    @property
    def step(self) -> float:
        """The distance of subnormal numbers."""
        return self.least / (1 << self.mantissa)


E4M3 = Format("e4m3", dtypes.fp8e4m3, 448.0, 3, 7)
E5M2 = Format("e5m2", dtypes.fp8e5m2, 57344.0, 2, 15)
FORMATS = {each.name: each for each in (E4M3, E5M2)}


@dataclass(frozen=True)
class Codes:
    """uint8 codes of a tensor, the inverse of their scales, float32, and what the rounding lost."""
    codes: Tensor
    inverse: Tensor
    lost: Tensor


def scale_of(amax: Tensor, most: float, power_of_two: bool = False) -> Tensor:
    """float32 scales of largest magnitudes: most / amax, and 1 where that is 0 or not finite. A scale beyond
    float32 is its largest number. `power_of_two`: the power below."""
    scale = quotient(Tensor(most, dtype=dtypes.float32, device=amax.device), amax)
    scale = scale.isinf().where(FLOAT32_MOST, scale)
    if power_of_two: scale = (scale.bitcast(dtypes.uint32) & 0xFF800000).bitcast(dtypes.float32)
    return ((amax > 0) & amax.isfinite()).where(scale, 1.0)


def inverse_of(scale: Tensor) -> Tensor:
    """1 / scale, float32."""
    return quotient(Tensor(1.0, dtype=dtypes.float32, device=scale.device), scale)


def quotient(x: Tensor, y: Tensor) -> Tensor:
    """x / y rounded to float32: tinygrad multiplies by a reciprocal, which may be a unit off."""
    return (x.cast(dtypes.float64) / y.cast(dtypes.float64)).float()


def bits_of(x: Tensor, to: Format) -> Tensor:
    """The codes, uint8, of the numbers of a format that are nearest to float32 ones."""
    clamped, drop = x.clamp(-to.most, to.most), 23 - to.mantissa
    bits = clamped.bitcast(dtypes.uint32)
    magnitude = bits & 0x7FFFFFFF
    # what is carried reaches the exponent by itself
    nearest = (magnitude + ((1 << (drop - 1)) - 1) + ((magnitude >> drop) & 1)) >> drop
    small = (clamped.abs() * (1 / to.step)).round().cast(dtypes.uint32)
    made = (clamped.abs() < to.least).where(small, nearest - ((127 - to.bias) << to.mantissa))
    return x.isfinite().where(made | ((bits >> 24) & 0x80), NAN).cast(dtypes.uint8)


def by_tensor(x: Tensor, to: Format, scale: Tensor | None = None) -> Codes:
    """x as codes with one scale, float32 (1): the one that is given, else that of x's largest magnitude."""
    wide = x.float()
    amax = wide.abs().max().reshape(1)
    if scale is None: scale = scale_of(amax, to.most).contiguous()
    scaled = wide * scale.reshape((1,) * x.ndim)
    codes = bits_of(scaled, to).contiguous()
    return Codes(codes, inverse_of(scale), _count_losses(amax, wide, scaled, codes, to))


def by_block(x: Tensor, to: Format, rows: int, columns: int, power_of_two: bool = True) -> Codes:
    """x (M, K) as codes with a scale for each block, (blocks of M, blocks of K); the last may be cut off."""
    m, k = (int(extent) for extent in x.shape)
    wide = x.float()
    padded = wide.pad(((0, -m % rows), (0, -k % columns)))
    blocks = padded.reshape(-(-m // rows), rows, -(-k // columns), columns)
    amax = blocks.abs().max((1, 3), keepdim=True)
    scale = scale_of(amax, to.most, power_of_two).contiguous()
    scaled = (blocks * scale).reshape(padded.shape)[:m, :k]
    codes = bits_of(scaled, to).contiguous()
    return Codes(codes, inverse_of(scale).reshape(scale.shape[0], scale.shape[2]),
                 _count_losses(amax.max().reshape(1), wide, scaled, codes, to))


def _count_losses(amax: Tensor, x: Tensor, scaled: Tensor, codes: Tensor, to: Format) -> Tensor:
    clamped = (scaled.abs() > to.limit) & scaled.isfinite()
    flushed = (x != 0) & (codes & 0x7F).eq(0)
    counts = [each.cast(dtypes.float32).sum().reshape(1) for each in (clamped, flushed)]
    # in memory: in one kernel with the others a sum would be made again for each figure
    return Tensor.cat(*(each.contiguous() for each in (amax, *counts))).contiguous().detach()
