"""The templates of a matmul on a CPU: gemv/ (few rows), amx.py (AMX tiles), blocked/ (everything)."""
from __future__ import annotations

from tinygrad_nv.cpu.gemm import amx, choose
from tinygrad_nv.cpu.gemm.blocked import kernel as blocked
from tinygrad_nv.cpu.gemm.gemv import kernel as gemv
from tinygrad_nv.cpu.gemm.ordered import order_schedule
from tinygrad_nv.cpu.gemm.schedules import Amx, CPUGemm, CPUGemmSchedule, CPUGemv
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.template import Family

GEMV = template(GemmSpec, CPUGemv, gemv.default, gemv.problems, gemv.__name__)
AMX = template(GemmSpec, Amx, amx.default, amx.problems, amx.__name__)
GEMM = template(GemmSpec, CPUGemm, blocked.default, blocked.problems, blocked.__name__)


def _choose(spec: GemmSpec, target: CPU) -> CPUGemmSchedule | None:
    """The schedule of a matmul; None too where tinygrad's own code is as fast."""
    return None if choose.too_short(spec) else choose.choose(spec, target)


FAMILY = Family("gemm", (GEMV, AMX, GEMM), _choose, lambda spec, _: choose.too_short(spec),
                determinism_class=order_schedule)
