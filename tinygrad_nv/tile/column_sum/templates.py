"""The template of sums of columns on a GPU.

Protocol: a warp goes through rows with a vector of columns a thread. `groups` of rows have CTAs of their own,
whose sums a second kernel adds up. They are chosen by the extents alone, so that the order of sums does not
depend on the GPU.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from tinygrad_nv.tile.column_sum.spec import ColumnSumSpec
from tinygrad_nv.tile.epilogue import problems as refused
from tinygrad_nv.tile.expression import loads
from tinygrad_nv.tile.order import OVER_ROWS
from tinygrad_nv.tile.schedule import Schedule, count_words
from tinygrad_nv.tile.template import GPU, Family, Template, lazy_build

WARPS = 8           # of a CTA, each with its own rows
TOGETHER = 4        # rows of a warp whose loads are under way together
MANY_CTAS = 264     # two for each of 132 SMs
VECTOR_BYTES = 16


@dataclass(frozen=True)
class ColumnSum(Schedule):
    """`vector` columns of a thread, `groups` of rows."""
    template: ClassVar[str] = "column_sum"
    vector: int = 1
    groups: int = 1

    def words(self) -> list[str]: return [f"{self.vector} columns a thread",
                                          count_words(self.groups, "group")]

    @property
    def span(self) -> int:
        """Columns of a CTA."""
        return 32 * self.vector

    @staticmethod
    @lru_cache(1024)
    def of(spec: ColumnSumSpec) -> ColumnSum:
        """The schedule of a spec."""
        along = [load for load in loads(spec.term) if load.n]
        vector = VECTOR_BYTES // max((load.dtype.itemsize for load in along), default=4)
        while vector > 1 and (spec.n % vector or any(x % vector for load in along
                                                      for x in (load.m, load.offset))): vector //= 2
        most = max(1, MANY_CTAS // -(-spec.n // (32 * vector)))
        return ColumnSum(vector, max(1, min(most, spec.m // (WARPS * TOGETHER))))


def problems(spec: ColumnSumSpec, schedule: ColumnSum, gpu: GPU) -> list[str]:
    """Why the template does not take a spec; empty when it does."""
    out = refused(spec.term, gpu.arch)
    if any(load.n not in (0, 1) for load in loads(spec.term)): out.append("elements of a row lie apart")
    if any(min(load.m, load.n, load.offset) < 0 for load in loads(spec.term)): out.append("a flipped operand")
    own = ColumnSum.of(spec)
    return out if out or schedule == own else [f"{schedule} is not {own}"]


COLUMN_SUM = Template("column_sum", ColumnSumSpec, ColumnSum, problems,
                      lambda spec, gpu: (ColumnSum.of(spec),),
                      lazy_build("tinygrad_nv.tile.column_sum.kernel", "column_sum"))
FAMILY = Family("column_sum", (COLUMN_SUM,), determinism_class=OVER_ROWS)
