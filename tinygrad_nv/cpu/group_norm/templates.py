"""The template of group norm on a CPU."""
from __future__ import annotations

from tinygrad_nv.cpu.group_norm import kernel
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.group_norm.spec import GroupNormSpec
from tinygrad_nv.tile.template import Family

GROUP_NORM = template(GroupNormSpec, kernel.CPUGroupNorm, kernel.default, kernel.problems, kernel.__name__)
FAMILY = Family("group_norm", (GROUP_NORM,),
                determinism_class="each image alone, in an order that its extents give")
