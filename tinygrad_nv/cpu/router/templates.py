"""The templates of a router on a CPU, and of the order of slots whose experts are given."""
from __future__ import annotations

from tinygrad_nv.cpu.router import kernel, rows
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.order import BY_ROW
from tinygrad_nv.tile.router.spec import GroupRowsSpec, RouterSpec
from tinygrad_nv.tile.template import Family

ROUTER = template(RouterSpec, kernel.CPURouter, kernel.default, kernel.problems, kernel.__name__)
ROWS = template(GroupRowsSpec, rows.CPUGroupRows, rows.default, rows.problems, rows.__name__)
FAMILY = Family("router", (ROUTER, ROWS), determinism_class=BY_ROW)
