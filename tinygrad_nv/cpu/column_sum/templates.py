"""The template of sums of columns on a CPU."""
from __future__ import annotations

from tinygrad_nv.cpu.column_sum import kernel
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.column_sum.spec import ColumnSumSpec
from tinygrad_nv.tile.order import OVER_ROWS
from tinygrad_nv.tile.template import Family

COLUMN_SUM = template(ColumnSumSpec, kernel.CPUColumnSum, kernel.default, kernel.problems, kernel.__name__)
FAMILY = Family("column_sum", (COLUMN_SUM,), determinism_class=OVER_ROWS)
