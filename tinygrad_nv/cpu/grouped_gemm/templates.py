"""The templates of grouped matmuls on a CPU, and of the gradients of their matrices."""
from __future__ import annotations

from tinygrad_nv.cpu.grouped_gemm import kernel, layout, outer
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec, MixedGroupedSpec, TransposedGroupedSpec
from tinygrad_nv.tile.template import Family

GROUPED = template(GroupedGemmSpec, layout.CPUGrouped, layout.default, layout.problems, kernel.__name__)
MIXED = template(MixedGroupedSpec, layout.CPUGroupedMixed, layout.default_mixed, layout.problems,
                 kernel.__name__)
TRANSPOSED = template(TransposedGroupedSpec, layout.CPUGroupedTransposed, layout.default_transposed,
                      layout.problems, kernel.__name__)
OUTER = template(GroupedOuterSpec, outer.CPUGroupedOuter, outer.default, outer.problems, outer.__name__)
FAMILY = Family("grouped_gemm", (GROUPED, MIXED, TRANSPOSED, OUTER))
