"""Which schedule a spec gets on a CPU, or why none.

Protocol: as tile/choose.py for GPUs. Templates are asked in order; the first that takes the spec gives the
schedule. `why_not` collects what they say.
"""
from __future__ import annotations

from types import ModuleType

from tinygrad_nv.cpu import gemv
from tinygrad_nv.cpu.kernel import CPUKernel
from tinygrad_nv.cpu.machine import CPUMachine
from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.tile.spec import GemmSpec

PRODUCTS: tuple[ModuleType, ...] = (gemv,)
_BY_NAME = {template.TEMPLATE: template for template in PRODUCTS}


def product(spec: GemmSpec, machine: CPUMachine) -> CPUSchedule | None:
    """The schedule of a product; None when no template takes it."""
    return next((t.default(spec, machine) for t in PRODUCTS if not t.problems(spec, machine)), None)


def why_not(spec: GemmSpec, machine: CPUMachine) -> str:
    """What each template says of a product that none takes."""
    return "; ".join(f"{t.TEMPLATE}: {', '.join(t.problems(spec, machine))}" for t in PRODUCTS)


def build(spec: GemmSpec, schedule: CPUSchedule) -> CPUKernel:
    """The kernel of a product."""
    made: CPUKernel = _BY_NAME[schedule.template].build(spec, schedule)
    return made
