"""The template of rows on a CPU: norms, softmax, argmax."""
from __future__ import annotations

from tinygrad_nv.cpu.norm import kernel
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.norm.spec import NormSpec
from tinygrad_nv.tile.order import BY_ROW
from tinygrad_nv.tile.template import Family

NORM = template(NormSpec, kernel.CPUNorm, kernel.default, kernel.problems, kernel.__name__)
FAMILY = Family("norm", (NORM,), determinism_class=BY_ROW)
