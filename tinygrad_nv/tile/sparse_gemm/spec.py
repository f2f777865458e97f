"""A matmul whose right operand is 2:4 sparse. A spec does not know its target.

Protocol: `gemm` is the matmul with the operand whole: b of a's dtype, dense, rows along k. In b's place
kernels take the buffers of quant/sparse.py:

    out; a; values, metadata; x0, x1, …

Metadata of a stage: of each tile of 16 rows, units of 64 columns one after the other, a word for each
lane. The same in memory and in shared memory, so that a warp reads 128 bytes side by side.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.errors import SpecError
from tinygrad_nv.quant.sparse import DTYPES, UNIT, buffers
from tinygrad_nv.quant.types import TILE, Buffer
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand

UNIT_WORDS = 32


@dataclass(frozen=True)
class SparseGemmSpec:
    """A matmul with a sparse matrix. Raises `SpecError` for what cannot be."""
    gemm: GemmSpec

    def __post_init__(self) -> None:
        gemm = self.gemm
        if gemm.a.dtype not in DTYPES:
            raise SpecError(f"sparse operands of {gemm.a.dtype.name}", ", ".join(d.name for d in DTYPES))
        if gemm.b != Operand(gemm.a.dtype, gemm.k, 1) or gemm.batch or gemm.parts > 1:
            raise SpecError(f"a sparse operand {gemm.b} of a batch {gemm.batch}, of {gemm.parts} parts",
                            f"one dense matrix, rows of {gemm.k} side by side")
        buffers(gemm.a.dtype, *self.shape)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the sparse matrix."""
        return self.gemm.n, self.gemm.k

    @property
    def buffers(self) -> dict[str, Buffer]:
        """Buffers of the sparse matrix."""
        return buffers(self.gemm.a.dtype, *self.shape)

    @property
    def values(self) -> Operand:
        """The stored values of the matrix, as an operand of half as many columns."""
        return Operand(self.gemm.a.dtype, self.gemm.k // 2, 1)

    @property
    def integers(self) -> tuple[int, ...]:
        """The kernels' integer arguments, each at its most."""
        return self.gemm.integers

    @property
    def flops(self) -> int:
        """Multiplications and additions of the matmul, those with 0, too."""
        return self.gemm.flops

    @property
    def nbytes(self) -> int:
        """Bytes of the sparse matrix."""
        n, k = self.shape
        (tiles, units, lanes), _ = self.buffers["metadata"]
        return n * k // 2 * self.gemm.a.dtype.itemsize + 4 * tiles * units * lanes

    def __str__(self) -> str: return f"{self.gemm}, b 2:4 sparse"


def metadata_bytes(rows: int, columns: int) -> int:
    """Returns the bytes of metadata of so many rows and columns."""
    return rows // TILE * metadata_row_bytes(columns)


def metadata_row_bytes(columns: int) -> int:
    """Returns the bytes of metadata of a tile of 16 rows."""
    return columns // UNIT * UNIT_WORDS * 4


def steps_of_unit(itemsize: int) -> int:
    """Instructions that a unit is for, each with a selector of its own."""
    return 2 if itemsize == 2 else 1
