"""The template of a convolution on a CPU."""
from __future__ import annotations

from tinygrad_nv.cpu.conv import kernel
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.conv.spec import ConvSpec
from tinygrad_nv.tile.template import Family

CONV = template(ConvSpec, kernel.ImplicitGemm, kernel.default, kernel.problems, kernel.__name__)
FAMILY = Family("conv", (CONV,), determinism_class=kernel.order_schedule)
