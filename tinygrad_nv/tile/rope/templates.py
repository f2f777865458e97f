"""The template of rotary positions on a GPU."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.tile.limits import MOST_GRID
from tinygrad_nv.tile.order import BY_ELEMENT
from tinygrad_nv.tile.rope.spec import RopeGradientSpec, RopeSpec
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import Family, make_template


@dataclass(frozen=True)
class Rope(Schedule):
    """Nothing to choose."""
    template: ClassVar[str] = "rope"


@dataclass(frozen=True)
class RopeGradient(Schedule):
    """Nothing to choose."""
    template: ClassVar[str] = "rope_gradient"


def problems(spec: RopeSpec, arch: str) -> list[str]:
    """Why no kernel can do it; empty when one can."""
    out = [f"{spec.d - 2 * spec.half} of {spec.d} elements not rotated"] * (2 * spec.half != spec.d)
    heads = spec.heads + 2 * spec.kv_heads
    if heads > MOST_GRID: out.append(f"{heads} heads, at most {MOST_GRID}")
    return out


MODULE = "tinygrad_nv.tile.rope.kernel"
FAMILY = Family("rope", (make_template(RopeSpec, Rope, problems, MODULE, "rope"),
                         make_template(RopeGradientSpec, RopeGradient, problems, MODULE, "rope")),
                determinism_class=BY_ELEMENT)
