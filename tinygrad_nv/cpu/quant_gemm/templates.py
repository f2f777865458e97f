"""The templates of a matmul with a quantised matrix on a CPU: amx.py, panels.py and dots.py (in
tiles), codes_amx.py and codes.py (of codes), gemv.py (few rows), blocked.py."""
from __future__ import annotations

from tinygrad_nv.cpu.gemm.blocked.blocks import in_blocks, words
from tinygrad_nv.cpu.quant_gemm import amx, blocked, codes, codes_amx, dots, gemv, panels
from tinygrad_nv.cpu.quant_gemm.schedules import (
    CodesAmx,
    CodesDots,
    QuantAmx,
    QuantDots,
    QuantGemm,
    QuantGemv,
    QuantPanels,
)
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.order import Ordered
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.template import Family

GEMV = template(QuantGemmSpec, QuantGemv, gemv.default, gemv.problems, gemv.__name__)
GEMM = template(QuantGemmSpec, QuantGemm, blocked.default, blocked.problems, blocked.__name__)
DOTS = template(QuantGemmSpec, QuantDots, dots.default, dots.problems, dots.__name__)
AMX = template(QuantGemmSpec, QuantAmx, amx.default, amx.problems, amx.__name__)
PANELS = template(QuantGemmSpec, QuantPanels, panels.default, panels.problems, panels.__name__)
CODES_AMX = template(QuantGemmSpec, CodesAmx, codes_amx.default, codes_amx.problems, codes_amx.__name__)
CODES_DOTS = template(QuantGemmSpec, CodesDots, codes.default, codes.problems, codes.__name__)


def _order_schedule(spec: QuantGemmSpec, target: CPU) -> Ordered | None:
    """The blocked kernel, which takes every number of rows (cpu/gemm/blocked/blocks.py)."""
    if spec.int8: return None
    made = in_blocks(blocked.default(spec, target), spec.gemm, target)
    return None if GEMM.problems(spec, made, target) else Ordered(made, words(made))


FAMILY = Family("quant_gemm", (CODES_AMX, CODES_DOTS, AMX, PANELS, DOTS, GEMV, GEMM),
                determinism_class=_order_schedule)
