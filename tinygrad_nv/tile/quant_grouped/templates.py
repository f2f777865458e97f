"""The templates of grouped matmuls with quantised matrices on GPUs: gemv/ (few rows a group), wgmma/
(sm_90a), mma/. Their costs choose among them."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.gemm.spec import FLOAT16S
from tinygrad_nv.tile.grouped_gemm.cost import cheapest
from tinygrad_nv.tile.quant_gemm import fragments
from tinygrad_nv.tile.quant_grouped import cost
from tinygrad_nv.tile.quant_grouped.gemv import plan as gemv
from tinygrad_nv.tile.quant_grouped.mma import plan as mma
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedGemv, QuantGroupedMma, QuantGroupedWgmma
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.quant_grouped.wgmma import plan as wgmma
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU, AnyTemplate, Family, Template, lazy_build, legality

C = TypeVar("C", bound=Schedule)


def _whole(own: Callable[[QuantGroupedSpec, C, str], Sequence[str]]
           ) -> Callable[[QuantGroupedSpec, C, GPU], list[str]]:
    """Why a template cannot have a schedule; empty when it can."""
    def find_problems(spec: QuantGroupedSpec, s: C, arch: str) -> tuple[str, ...]:
        asked = fragments.problems(spec.type)
        if spec.grouped.dtype not in FLOAT16S: asked.append(f"activations of {spec.grouped.dtype.name}")
        if spec.int8: asked.append("activations of int8")
        return (*asked, *(() if asked else own(spec, s, arch)))
    return legality(find_problems)


GEMV = Template("quant_grouped_gemv", QuantGroupedSpec, QuantGroupedGemv, _whole(gemv.problems),
                gemv.candidates, lazy_build("tinygrad_nv.tile.quant_grouped.gemv.kernel",
                                            "quant_grouped_gemv"),
                cost.of_gemv)
WGMMA = Template("quant_grouped_wgmma", QuantGroupedSpec, QuantGroupedWgmma, _whole(wgmma.problems),
                 wgmma.candidates,
                 lazy_build("tinygrad_nv.tile.quant_grouped.wgmma.kernel",
                            "quant_grouped_wgmma"), cost.of_wgmma)
MMA = Template("quant_grouped_mma", QuantGroupedSpec, QuantGroupedMma, _whole(mma.problems), mma.candidates,
               lazy_build("tinygrad_nv.tile.quant_grouped.mma.kernel", "quant_grouped_mma"), cost.of_mma)
TEMPLATES: tuple[AnyTemplate, ...] = (GEMV, MMA, WGMMA)


def _default(spec: QuantGroupedSpec, gpu: GPU) -> Schedule | None:
    return cheapest(TEMPLATES, spec, gpu)


FAMILY = Family("quant_grouped", TEMPLATES, choose, defaults=_default)
