"""Specs of the term that adapters add to a linear layer, in types. A spec does not know its target.

Protocol: a batch has `rows` rows of x [rows, k]; each has one of E adapters, or none. order [rows] and
offsets [E + 2] sort them (patterns/router/rows.py): adapter e has rows order[offsets[e]:offsets[e + 1]], and
those without an adapter stand last. A layer's `segments` are projections that lie one below the other in one
matrix (q|k|v): adapters have an A and a B of each, of ranks ranks[e, segment] ≤ rank.

    shrink   h[i, s · rank + r] = Σ_k x[order[i], k] · A[e, s · rank + r, k]       A [E, segments · rank, k]
    expand   out[order[i], n]   = Σ_r h[i, s · rank + r] · B[e, r, n]              B [E, rank, n]

n lies in segment s, r < ranks[e, s], sums are float32 and rounded once. All else of h, and of out in rows
without an adapter, is 0 in the reference and on CPUs. Where a GPU's kernel runs, rows of h without an adapter
may hold anything. A and B are 0 from ranks[e, s] on: kernels may multiply those, or leave them out.

Sources: Punica (arXiv 2310.18547) and S-LoRA (arXiv 2311.03285) multiply segments of rows so.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.grouped_gemm.spec import FLOATS, GroupedGemmSpec, TransposedGroupedSpec


@dataclass(frozen=True)
class LoraSpec:
    """Term of `adapters` adapters and so many rows. x, h and results are of `dtype`, A and B of `matrix`: the
    same, or a 16-bit float beside float32. Raises `SpecError` for what cannot be."""
    adapters: int
    rows: int
    rank: int
    dtype: DType = dtypes.float32
    matrix: DType = dtypes.float32

    def __post_init__(self) -> None:
        if min(self.adapters, self.rows, self.rank) < 1:
            raise SpecError(f"{self.adapters} adapters of rank {self.rank}, {self.rows} rows", "1 at least")
        if self.dtype not in FLOATS or self.matrix not in (self.dtype, *FLOATS[1:] * (
                self.dtype == dtypes.float32)):
            raise SpecError(f"rows of {short(self.dtype)}, adapters of {short(self.matrix)}",
                            "floats of one dtype, or 16-bit floats beside f32")

    @property
    def integers(self) -> tuple[int, ...]:
        """A kernel's integer arguments."""
        return ()


@dataclass(frozen=True)
class LoraShrinkSpec(LoraSpec):
    """x Aᵀ of `parts` segments."""
    k: int = 1
    parts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.k, self.parts) < 1:
            raise SpecError(f"{self.k} columns, {self.parts} segments", "1 at least")

    @property
    def columns(self) -> int:
        """Columns of h."""
        return self.parts * self.rank

    @property
    def grouped_gemm(self) -> GroupedGemmSpec:
        """The same as a grouped matmul, which multiplies up to `rank`."""
        return GroupedGemmSpec(self.adapters, self.rows, self.columns, self.k, self.dtype, self.rows, 1)

    @property
    def active_bytes(self) -> int:
        """Bytes of matrices that are read at most."""
        return min(self.adapters, self.rows) * self.columns * self.k * self.matrix.itemsize

    @property
    def flops(self) -> int:
        """Operations of all rows."""
        return 2 * self.rows * self.columns * self.k

    def __str__(self) -> str:
        return (f"{self.rows}x{self.k} by {self.parts} x rank {self.rank} of {self.adapters} adapters "
                f"{short(self.matrix)}")


@dataclass(frozen=True)
class LoraExpandSpec(LoraSpec):
    """h Bᵀ, of columns in segments."""
    segments: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.segments, default=0) < 1: raise SpecError(f"segments {self.segments}", "columns of each")

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return sum(self.segments)

    @property
    def pitch(self) -> int:
        """Columns of h."""
        return len(self.segments) * self.rank

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The first column of each segment, and its end."""
        return list(pairwise(accumulate(self.segments, initial=0)))

    @property
    def grouped_gemm(self) -> TransposedGroupedSpec:
        """The same as a grouped matmul whose last group has rows without an adapter."""
        return TransposedGroupedSpec(self.adapters + 1, self.rows, self.columns, self.rank, self.dtype,
                                     self.rows, scatter=True)

    @property
    def active_bytes(self) -> int:
        """Bytes of matrices that are read at most."""
        return min(self.adapters, self.rows) * self.rank * self.columns * self.matrix.itemsize

    @property
    def flops(self) -> int:
        """Operations of all rows."""
        return 2 * self.rows * self.rank * self.columns

    def __str__(self) -> str:
        return (f"{self.rows}x{'|'.join(map(str, self.segments))} by rank {self.rank} of {self.adapters} "
                f"adapters {short(self.matrix)}")
