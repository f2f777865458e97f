"""Default schedules of the templates of a matmul."""
from __future__ import annotations

from functools import lru_cache

from tinygrad_nv.cpu.gemm.schedules import CPUGemmSchedule
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.gemm.spec import INT8S, GemmSpec
from tinygrad_nv.tile.template import AnyTemplate
from tinygrad_nv.tile.templates import TABLE

FEWEST_BY_FOURS = 5    # rows of bytes that are not for gemv


@lru_cache(4096)
def default(spec: GemmSpec, target: CPU) -> CPUGemmSchedule | None:
    """The default schedule, where none was tuned; None when no template takes the matmul."""
    return next(iter(starts(spec, target)), None)


def starts(spec: GemmSpec, target: CPU) -> list[CPUGemmSchedule]:
    """Returns the default schedule of each template that takes a matmul, the fastest first."""
    return [s for template in _order_templates(spec, target) for s in template.candidates(spec, target)
            if not template.problems(spec, s, target)]


def _order_templates(spec: GemmSpec, target: CPU) -> tuple[AnyTemplate, ...]:
    """Templates, the fastest first. On Zen 4 gemv is for all of its 16 rows, but not of bytes, of which gemm
    multiplies four at once: 16 rows by 4096 x 2048 take 2.1 ms, 4.5 by gemv; 4 rows the same."""
    by_fours = spec.a.dtype in INT8S and target.isa.vnni and min(spec.m, spec.n) >= FEWEST_BY_FOURS
    gemv, *others = TABLE.templates(target.kind, spec)
    return (*others, gemv) if by_fours else (gemv, *others)
