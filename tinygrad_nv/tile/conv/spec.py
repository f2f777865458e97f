"""A convolution as an implicit GEMM. A spec does not know its target.

Protocol: images x (B, H, W, C), filters w (O, KH, KW, C), the result (B, OH, OW, O), all dense:

    out[b, i, j, o] = epilogue(Σ x[b, i · stride − above + r, j · stride − left + s, c] · w[o, r, s, c])

summed over r, s and c; outside of an image x is 0. As a matmul its rows are (b, i, j), its columns o, and k
is (r, s, c): of each tap (r, s) the C elements of a row of the left operand lie side by side in an image.
Parameters are out, x, w, and those of the epilogue, which is one of the matmul's (tile/expression.py).
"""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import Expression, Sum, short, show
from tinygrad_nv.tile.gemm.spec import FLOAT16S, GemmSpec, Operand, Result

FLOATS = (dtypes.float32, *FLOAT16S)


@dataclass(frozen=True)
class ConvSpec:
    """A convolution. `padding` is rows above and below, columns left and right. An epilogue left out rounds
    the sum to the dtype. `tf32`: float32 operands may be cut to 10 bits of mantissa. Raises `SpecError` for
    what cannot be."""
    batch: int
    height: int
    width: int
    channels: int
    outputs: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dtype: DType
    epilogue: Expression = field(default=Sum())
    tf32: bool = False

    def __post_init__(self) -> None:
        if self.epilogue == Sum(): object.__setattr__(self, "epilogue", Sum().cast(self.dtype))
        images = self.batch, self.height, self.width, self.channels
        extents = (*images, self.outputs, *self.kernel, *self.stride)
        if min(extents) < 1 or min(self.padding) < 0:
            raise SpecError(f"{extents}, padding {self.padding}", "extents and strides ≥ 1, padding ≥ 0")
        if self.dtype not in FLOATS: raise SpecError(short(self.dtype), ", ".join(map(short, FLOATS)))
        if min(self.out_height, self.out_width) < 1:
            raise SpecError(f"filters {self.kernel} over {self.height}x{self.width}, padding {self.padding}",
                            "filters no larger than padded images")
        _ = self.gemm

    @property
    def out_height(self) -> int:
        """Rows of the result's images."""
        return (self.height + sum(self.padding[:2]) - self.kernel[0]) // self.stride[0] + 1

    @property
    def out_width(self) -> int:
        """Columns of the result's images."""
        return (self.width + sum(self.padding[2:]) - self.kernel[1]) // self.stride[1] + 1

    @cached_property
    def gemm(self) -> GemmSpec:
        """The matmul that it is, whose left operand would lie as (B OH OW, KH KW C), dense."""
        m, k = self.batch * self.out_height * self.out_width, self.kernel[0] * self.kernel[1] * self.channels
        return GemmSpec(m, self.outputs, k, Operand(self.dtype, k, 1), Operand(self.dtype, k, 1),
                        Result(self.dtype, self.outputs, 1), epilogue=self.epilogue, tf32=self.tf32)

    @property
    def parameters(self) -> tuple[DType, ...]:
        """The dtypes of the epilogue's parameters."""
        return self.gemm.parameters

    @property
    def flops(self) -> int:
        """Multiplications and additions, those with padding included."""
        return self.gemm.flops

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written, everything once, but for the epilogue's parameters."""
        images = self.batch * self.height * self.width * self.channels
        return (images + self.gemm.n * (self.gemm.k + self.gemm.m)) * self.dtype.itemsize

    def __str__(self) -> str:
        size = f"{self.batch}x{self.height}x{self.width}x{self.channels}"
        stride = "" if self.stride == (1, 1) else f", stride {self.stride[0]}x{self.stride[1]}"
        padding = f", padding {'/'.join(map(str, self.padding))}" if any(self.padding) else ""
        ends = "" if self.gemm.plain else f", {show(self.epilogue)}"
        tf32 = "(tf32)" if self.tf32 else ""
        return (f"{size} * {self.outputs} of {self.kernel[0]}x{self.kernel[1]}{stride}{padding}, "
                f"{short(self.dtype)}{tf32}{ends}")
