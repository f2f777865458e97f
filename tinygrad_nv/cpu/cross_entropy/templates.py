"""The templates of cross entropy on a CPU."""
from __future__ import annotations

from tinygrad_nv.cpu.cross_entropy import kernel
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.cross_entropy.spec import CrossEntropySpec, DistillationSpec
from tinygrad_nv.tile.order import OVER_ROWS
from tinygrad_nv.tile.template import Family

ROWS = template(CrossEntropySpec, kernel.CPUCrossEntropy, kernel.default, None, kernel.__name__)
DISTILLATION = template(DistillationSpec, kernel.CPUDistillation, kernel.default_distillation, None,
                        kernel.__name__, "build_distillation")
FAMILY = Family("cross_entropy", (ROWS, DISTILLATION), determinism_class=OVER_ROWS)
