"""The templates of rotary positions on a CPU."""
from __future__ import annotations

from tinygrad_nv.cpu.rope import kernel
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.order import BY_ELEMENT
from tinygrad_nv.tile.rope.spec import RopeGradientSpec, RopeSpec
from tinygrad_nv.tile.template import Family

ROPE = template(RopeSpec, kernel.CPURope, kernel.default, None, kernel.__name__)
GRADIENT = template(RopeGradientSpec, kernel.CPURopeGradient, kernel.default_gradient,
                    kernel.gradient_problems, kernel.__name__, "gradient")
FAMILY = Family("rope", (ROPE, GRADIENT), determinism_class=BY_ELEMENT)
