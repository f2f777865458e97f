"""Rotary positions (RoFormer, arXiv 2104.09864) of whole sequences. A spec does not know its target.

Protocol: a matmul gives q|k|v (B, T, (H + 2 H_kv) D); attention takes q (B, H, T, D) and k, v
(B, H_kv, T, D). Heads of q and k are rotated, i with i + half; what lies beyond 2 · half, and v, are copied.

    forward     low' = low · cos − high · sin, high' = high · cos + low · sin
    backward    the same with −sin, from the gradients of q, k and v to that of q|k|v

Everything is computed in float32 and rounded once. Angles are cosines and sines, (T, half) or (B, T, half),
in storage of their own; the elements of a row lie side by side.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.spec import FLOAT16S

FLOATS = (dtypes.float32, *FLOAT16S)


@dataclass(frozen=True)
class Angles:
    """Places of the angles of token t of sequence b: they begin at offset + b · batch + t · row, in
    elements."""
    dtype: DType
    row: int
    batch: int = 0
    offset: int = 0


@dataclass(frozen=True)
class RopeSpec:
    """From q|k|v to heads. Raises `SpecError` for what cannot be."""
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    d: int
    half: int
    dtype: DType
    angles: Angles

    def __post_init__(self) -> None:
        least = min(self.batch, self.tokens, self.heads, self.kv_heads, self.half)
        if least < 1 or 2 * self.half > self.d:
            heads = f"{self.heads}/{self.kv_heads} heads of {self.d}, {2 * self.half} rotated"
            raise SpecError(f"{self.batch}x{self.tokens} tokens, {heads}",
                            "extents ≥ 1, no more rotated than there is")
        for dtype in (self.dtype, self.angles.dtype):
            if dtype not in FLOATS: raise SpecError(short(dtype), ", ".join(map(short, FLOATS)))

    def dtype_of(self, name: str) -> DType:
        """The dtype of q, k or v in memory."""
        return self.dtype

    @property
    def width(self) -> int:
        """Elements of a token's q|k|v."""
        return (self.heads + 2 * self.kv_heads) * self.d

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written, angles once."""
        rows = self.batch * self.tokens
        return 2 * rows * self.width * self.dtype.itemsize + 2 * self.half * self.angles.dtype.itemsize * (
            rows if self.angles.batch else self.tokens)

    @property
    def flops(self) -> int:
        """Three operations for each rotated element."""
        return 6 * self.batch * self.tokens * (self.heads + self.kv_heads) * self.half

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads} heads"
        some = "" if 2 * self.half == self.d else f", {2 * self.half} rotated"
        return f"{self.batch}x{self.tokens}, {heads} of {self.d}{some}, {short(self.dtype)}"


@dataclass(frozen=True)
class RopeGradientSpec(RopeSpec):
    """From the gradients of heads to that of q|k|v. `wide_q`: that of q, as attention adds it up, is of
    float32 in memory, and rounded to the dtype before it is rotated."""
    wide_q: bool = False

    def dtype_of(self, name: str) -> DType:
        return dtypes.float32 if self.wide_q and name == "q" else self.dtype

    @property
    def nbytes(self) -> int:
        more = self.dtype_of("q").itemsize - self.dtype.itemsize
        return super().nbytes + more * self.batch * self.tokens * self.heads * self.d

    def __str__(self) -> str:
        return f"gradient {super().__str__()}{', q of float32' if self.wide_q else ''}"
