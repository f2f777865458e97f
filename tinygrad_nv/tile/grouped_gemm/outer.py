"""Sums of outer products of the rows of each group, in types: gradients of the matrices of grouped matmuls.

Protocol: of y [y_rows, N], x [x_rows, K] and offsets [E + 1], and an order [rows] where one of the two is
gathered, all contiguous; rows offsets[e] … offsets[e + 1] − 1 are group e:

    out[e, n, k] = Σ y[a(i), n] · x[b(i), k]     over rows i of group e, in float32; rounded once

a(i) is order[i] // gather_y, or i where that is 0; b(i) so with gather_x. A group without rows has zeros.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.grouped_gemm.spec import FLOATS


@dataclass(frozen=True)
class GroupedOuterSpec:
    """`groups` sums (n, k) over `rows` rows of y and x, which have one dtype with the results. Raises
    `SpecError` for what cannot be."""
    groups: int
    rows: int
    n: int
    k: int
    dtype: DType = dtypes.float32
    y_rows: int = 0         # 0: as many as rows
    x_rows: int = 0
    gather_y: int = 0
    gather_x: int = 0

    def __post_init__(self) -> None:
        if min(self.groups, self.rows, self.n, self.k) < 1 or \
                min(self.y_rows, self.x_rows, self.gather_y, self.gather_x) < 0:
            raise SpecError(f"{self.groups} sums of {self.n}x{self.k} over {self.rows} rows", "extents ≥ 1")
        if self.dtype not in FLOATS: raise SpecError(f"elements of {short(self.dtype)}", "floats")
        for there, gather in ((self.of_y, self.gather_y), (self.of_x, self.gather_x)):
            if gather and self.rows > gather * there:
                raise SpecError(f"gather={gather}, {self.rows} rows of {there}", "as many rows, at most")
            if not gather and there != self.rows:
                raise SpecError(f"an order of {self.rows} for {there} rows", "gather, or as many")

    @property
    def of_y(self) -> int:
        """Rows of y."""
        return self.y_rows or self.rows

    @property
    def of_x(self) -> int:
        """Rows of x."""
        return self.x_rows or self.rows

    @property
    def has_order(self) -> bool:
        """Whether there is an order."""
        return bool(self.gather_y or self.gather_x)

    @property
    def flops(self) -> int:
        """Operations of all rows."""
        return 2 * self.rows * self.n * self.k

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written once."""
        moved = self.groups * self.n * self.k + self.of_y * self.n + self.of_x * self.k
        return moved * self.dtype.itemsize

    @property
    def integers(self) -> tuple[int, ...]:
        """A kernel's integer arguments."""
        return ()

    def __str__(self) -> str:
        more = [f", {name} // {gather}" for name, gather in (("y", self.gather_y), ("x", self.gather_x))
                if gather]
        words = f"{self.groups} sums of {self.n}x{self.k} over {self.rows} rows {short(self.dtype)}"
        return "".join([words, *more])
