"""The templates of products on a CPU, in their order, and what they choose by themselves."""
from __future__ import annotations

from types import ModuleType

from tinygrad_nv.cpu.gemm import amx
from tinygrad_nv.cpu.gemm.blocked import kernel as gemm
from tinygrad_nv.cpu.gemm.gemv import kernel as gemv
from tinygrad_nv.cpu.kernel import CPUKernel
from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.gemm.spec import INT8S, GemmSpec

PRODUCTS: tuple[ModuleType, ...] = (gemv, amx, gemm)
FEWEST_BY_FOURS = 5  # rows of bytes that are not for gemv
_BY_NAME = {template.TEMPLATE: template for template in PRODUCTS}


def default(spec: GemmSpec, target: CPU) -> CPUSchedule | None:
    """The schedule where nobody has tried others; None when no template takes the product."""
    templates = preferred(spec, target)
    return next((t.default(spec, target) for t in templates if not t.problems(spec, target)), None)


def preferred(spec: GemmSpec, target: CPU) -> tuple[ModuleType, ...]:
    """Templates, the fastest first. On Zen 4 gemv is for all of its 16 rows, but not of bytes, of which gemm
    multiplies four at once: 16 rows by 4096 x 2048 take 2.1 ms, 4.5 by gemv; 4 rows the same."""
    by_fours = spec.a.dtype in INT8S and target.isa.vnni and min(spec.m, spec.n) >= FEWEST_BY_FOURS
    return (amx, gemm, gemv) if by_fours else PRODUCTS


def template(schedule: CPUSchedule) -> ModuleType:
    """The template of a schedule."""
    return _BY_NAME[schedule.template]


def build(spec: GemmSpec, schedule: CPUSchedule) -> CPUKernel:
    """The kernel of a product."""
    made: CPUKernel = template(schedule).build(spec, schedule)
    return made
