"""The template of grouped matmuls with quantised matrices on a CPU."""
from __future__ import annotations

from tinygrad_nv.cpu.quant_grouped import kernel, layout
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.template import Family

GROUPED = template(QuantGroupedSpec, layout.CPUQuantGrouped, layout.default, layout.problems,
                   kernel.__name__)
FAMILY = Family("quant_grouped", (GROUPED,))
