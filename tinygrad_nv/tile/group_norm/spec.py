"""Group norm (arXiv 1803.08494) of channels-last images. A spec does not know its target.

Protocol: x (B, P, C) of P positions, dense, weight and bias (C,), shift (B, C) where there is one. With
y = x + shift, and mean and variance of each image's y over all positions and the C / groups channels of a
group,

    out = act((y − mean) / √(variance + eps) · weight + bias)       act is nothing, or silu

in float32, rounded once. Parameters are out, x, weight, bias, shift.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.spec import FLOAT16S

FLOATS = (dtypes.float32, *FLOAT16S)


@dataclass(frozen=True)
class GroupNormSpec:
    """Group norm. `dtype` is that of x and the result, `affine` of weight and bias; `shift` None without
    one. Raises `SpecError` for what cannot be."""
    batch: int
    positions: int
    channels: int
    groups: int
    eps: float
    silu: bool
    dtype: DType
    affine: DType
    shift: DType | None = None

    def __post_init__(self) -> None:
        if min(self.batch, self.positions, self.channels, self.groups) < 1 or self.channels % self.groups:
            raise SpecError(f"{self.batch}x{self.positions}x{self.channels}, {self.groups} groups",
                            "extents ≥ 1, channels a multiple of groups")
        for dtype in (self.dtype, self.affine, self.shift or self.dtype):
            if dtype not in FLOATS: raise SpecError(short(dtype), ", ".join(map(short, FLOATS)))

    @property
    def nbytes(self) -> int:
        """x read once and the result written once."""
        return 2 * self.batch * self.positions * self.channels * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Three operations of each element for its statistics, and two for its result."""
        return 5 * self.batch * self.positions * self.channels

    def __str__(self) -> str:
        ends = "".join([", shift" * (self.shift is not None), ", silu" * self.silu])
        return (f"{self.batch}x{self.positions}x{self.channels}, {self.groups} groups, eps {self.eps:g}, "
                f"{short(self.dtype)}{ends}")
