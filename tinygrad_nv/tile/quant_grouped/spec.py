"""Matmuls of rows with the matrix of their group, of matrices that are quantised.

Protocol: `grouped` is the matmul with matrices dequantised (tile/grouped_gemm/spec.py). In place of w kernels
take the buffers of a stack (quant/stack.py), of a matrix for each group; with an activation of two, gate and
then up, each with rows of its own:

    out; x; codes, high, scales, zeros, mins, outer, outer_mins, order (those there are);
    offsets, then those there are of order, weights, bias

A kernel may round dequantised elements to x's dtype, as the reference does, or not round them. With `int8`
each `INT8_BLOCK` columns of a row become bytes and a scale before they are multiplied, as those of
tile/quant_gemm/spec.py; elements are not rounded then.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.errors import SpecError
from tinygrad_nv.quant.types import Buffer, QType, stack_buffers
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.quant_gemm.spec import INT8_BLOCK, QuantGemmSpec


@dataclass(frozen=True)
class QuantGroupedSpec:
    """A matmul with matrices of a type. Raises `SpecError` for what cannot be."""
    grouped: GroupedGemmSpec
    type: QType
    int8: bool = False

    def __post_init__(self) -> None:
        if self.int8 and (self.grouped.k % INT8_BLOCK or self.type.permuted):
            raise SpecError(f"{self.grouped.k} columns of int8 activations, of {self.type}",
                            f"a multiple of {INT8_BLOCK}, in the order of inputs")
        stack_buffers(self.type, self.stack)

    @property
    def stack(self) -> tuple[int, int, int]:
        """Matrices, their rows and columns."""
        one = self.grouped
        return one.groups * one.halves, one.columns, one.k

    @property
    def buffers(self) -> dict[str, Buffer]:
        """Buffers of the stack."""
        return stack_buffers(self.type, self.stack)

    @property
    def matrix(self) -> QuantGemmSpec:
        """Rows times one matrix of the stack."""
        (_, n, k), dtype = self.stack, self.grouped.dtype
        gemm = GemmSpec(self.grouped.rows, n, k, Operand(dtype, k, 1), Operand(dtype, k, 1),
                        Result(dtype, n, 1))
        return QuantGemmSpec(gemm, self.type, self.int8)

    @property
    def active_bytes(self) -> int:
        """Bytes of codes that are read at most."""
        one = self.grouped
        return min(one.groups, one.rows) * one.n * one.k * self.type.bits // 8

    @property
    def flops(self) -> int:
        """Operations of all rows."""
        return self.grouped.flops

    @property
    def integers(self) -> tuple[int, ...]:
        """A kernel's integer arguments."""
        return ()

    def __str__(self) -> str:
        return f"{self.grouped}, {'rows of int8, ' if self.int8 else ''}matrices of {self.type}"
