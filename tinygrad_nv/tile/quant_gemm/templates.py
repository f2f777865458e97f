"""The templates of a matmul with a quantised matrix on GPUs: gemv/ (few rows), wgmma/ (sm_90a), mma/."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tinygrad_nv.tile import epilogue
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.gemm.analytic import choose_ordered
from tinygrad_nv.tile.gemm.spec import FLOAT16S
from tinygrad_nv.tile.order import Ordered
from tinygrad_nv.tile.quant_gemm import fragments
from tinygrad_nv.tile.quant_gemm.gemv import plan as gemv
from tinygrad_nv.tile.quant_gemm.mma import plan as mma
from tinygrad_nv.tile.quant_gemm.schedules import QuantGemv, QuantMma, QuantWgmma
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.quant_gemm.wgmma import plan as wgmma
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU, AnyTemplate, Family, Template, first_legal, lazy_build, legality

C = TypeVar("C", bound=Schedule)


def _whole(own: Callable[[QuantGemmSpec, C, str], Sequence[str]]
           ) -> Callable[[QuantGemmSpec, C, GPU], list[str]]:
    """Why a template cannot have a schedule; empty when it can."""
    def find_problems(spec: QuantGemmSpec, s: C, arch: str) -> tuple[str, ...]:
        gemm = spec.gemm
        asked = [*fragments.problems(spec.type), *epilogue.problems(gemm.epilogue, arch)]
        if gemm.a.dtype not in FLOAT16S: asked.append(f"activations of {gemm.a.dtype.name}")
        if spec.int8: asked.append("activations of int8")
        return (*asked, *(() if asked else own(spec, s, arch)))
    return legality(find_problems)


GEMV = Template("quant_gemv", QuantGemmSpec, QuantGemv, _whole(gemv.problems), gemv.candidates,
                lazy_build("tinygrad_nv.tile.quant_gemm.gemv.kernel", "quant_gemv"))
WGMMA = Template("quant_wgmma", QuantGemmSpec, QuantWgmma, _whole(wgmma.problems), wgmma.candidates,
                 lazy_build("tinygrad_nv.tile.quant_gemm.wgmma.kernel", "quant_wgmma"))
MMA = Template("quant_mma", QuantGemmSpec, QuantMma, _whole(mma.problems), mma.candidates,
               lazy_build("tinygrad_nv.tile.quant_gemm.mma.kernel", "quant_mma"))
FEW = 8             # rows up to which the tensor cores of a gemv are not half idle
ONE_TILE = 16       # rows of a tile of mma.sync
COLUMNS = 128       # of such a tile


def _default(spec: QuantGemmSpec, gpu: GPU) -> Schedule | None:
    """The first legal candidate: of the gemv for few rows, of the wgmma for more, of whatever takes it. One
    tile of rows goes to mma.sync where its columns fill the GPU: the wgmma needs splits there, and an H100
    took 10 % longer for int4 and 13 % for int8 (28672 columns)."""
    filled = spec.gemm.n >= COLUMNS * (gpu.sm_count or 132)
    order: tuple[AnyTemplate, ...] = (WGMMA, GEMV, MMA)
    if spec.gemm.m <= FEW: order = (GEMV, WGMMA, MMA)
    elif spec.gemm.m <= ONE_TILE and filled: order = (MMA, WGMMA, GEMV)
    return first_legal(order, spec, gpu)


def _choose_ordered(spec: QuantGemmSpec, gpu: GPU) -> Ordered | None:
    return choose_ordered((WGMMA, MMA), spec, gpu, spec.gemm)


FAMILY = Family("quant_gemm", (GEMV, WGMMA, MMA), choose, defaults=_default,
                determinism_class=_choose_ordered)
