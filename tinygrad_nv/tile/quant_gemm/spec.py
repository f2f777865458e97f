"""A matmul whose right operand is quantised. A spec does not know its target.

Protocol: `gemm` is the matmul with the operand dequantised: b of a's dtype, dense, rows along k. Epilogue,
result, symbolic rows and parts are its own; part p has the matrix's rows p n … (p + 1) n − 1. In b's place
kernels take the matrix's buffers, in the order of `quant.types.buffers`:

    out; a; codes, high, scales, zeros, mins, outer, outer_mins, order (those there are); x0, x1, …

A kernel may round dequantised elements to a's dtype, as the reference does, or not round them. `int8`: each
`INT8_BLOCK` columns of a, in the matrix's order, become bytes q and a float32 scale d before they are
multiplied; dequantised elements are not rounded then:

    d = max |a| / 127       q = nearest(a · (1 / d)), ties to even       a ≈ q · d

`codes`: a is int8 itself, codes that were quantised before. They are multiplied with the matrix's codes, and
sums are int32, exact. Of the matrix's buffers kernels take `codes` alone: scales of both are parameters of
the epilogue.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.quant.types import INT8, Buffer, QType, buffers, nbytes
from tinygrad_nv.tile.gemm.spec import FLOAT16S, GemmSpec, Operand

INT8_BLOCK = 32     # activations that are quantised with one scale
FLOATS = (dtypes.float32, *FLOAT16S)


@dataclass(frozen=True)
class QuantGemmSpec:
    """A matmul with a matrix of a type. Raises `SpecError` for what cannot be."""
    gemm: GemmSpec
    type: QType
    int8: bool = False

    def __post_init__(self) -> None:
        gemm, (n, k) = self.gemm, self.shape
        if gemm.a.dtype not in (*FLOATS, dtypes.int8):
            raise SpecError(f"activations of {gemm.a.dtype.name}",
                            ", ".join(d.name for d in (*FLOATS, dtypes.int8)))
        scaled = QType(INT8, self.type.scale, layout=self.type.layout)
        if self.codes and (self.type != scaled or self.type.scale.columns or self.int8):
            raise SpecError(f"codes of activations, b of {self.type}", "int8 with scales of rows alone")
        apart = gemm.parts > 1 and gemm.part != gemm.n * k
        if gemm.b != Operand(gemm.a.dtype, k, 1) or gemm.batch or apart:
            raise SpecError(f"a quantised operand {gemm.b} of a batch {gemm.batch}",
                            f"one dense matrix, rows of {k} side by side")
        if self.int8 and gemm.k % INT8_BLOCK:
            raise SpecError(f"{gemm.k} columns of int8 activations", f"a multiple of {INT8_BLOCK}")
        buffers(self.type, n, k)

    @property
    def codes(self) -> bool:
        """Whether a is codes."""
        return self.gemm.a.dtype == dtypes.int8

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the quantised matrix, of all parts."""
        return self.gemm.parts * self.gemm.n, self.gemm.k

    @property
    def matrix_nbytes(self) -> int:
        """Bytes of the quantised matrix."""
        return nbytes(self.type, *self.shape)

    @property
    def buffers(self) -> dict[str, Buffer]:
        """Buffers of the quantised matrix that kernels take."""
        found = buffers(self.type, *self.shape)
        return {"codes": found["codes"]} if self.codes else found

    @property
    def integers(self) -> tuple[int, ...]:
        """The kernels' integer arguments, each at its most."""
        return self.gemm.integers

    @property
    def flops(self) -> int:
        """Multiplications and additions of the matmul."""
        return self.gemm.flops

    def __str__(self) -> str:
        return f"{self.gemm}, {'a of int8, ' if self.int8 else ''}b of {self.type}"
