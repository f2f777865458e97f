"""The template of grouped matmuls on a CPU."""
from __future__ import annotations

from tinygrad_nv.cpu.grouped_gemm import kernel, layout
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.template import Family

GROUPED = template(GroupedGemmSpec, layout.CPUGrouped, layout.default, layout.problems, kernel.__name__)
FAMILY = Family("grouped_gemm", (GROUPED,))
