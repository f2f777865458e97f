"""The template of a router on a CPU."""
from __future__ import annotations

from tinygrad_nv.cpu.router import kernel
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.router.spec import RouterSpec
from tinygrad_nv.tile.template import Family

ROUTER = template(RouterSpec, kernel.CPURouter, kernel.default, kernel.problems, kernel.__name__)
FAMILY = Family("router", (ROUTER,))
