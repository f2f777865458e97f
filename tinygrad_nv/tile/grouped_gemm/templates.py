"""The templates of grouped matmuls on GPUs: gemv/ (few rows a group), wgmma/ (sm_90a), mma/ (sm_80 and
later), and outer_mma/ of the gradients of their matrices. Their costs choose among them; of those as near as
`TIE` the earlier one is liked better."""
from __future__ import annotations

from functools import lru_cache

from tinygrad_nv.tile import choose
from tinygrad_nv.tile.grouped_gemm.gemv import plan as gemv
from tinygrad_nv.tile.grouped_gemm.mma import plan as mma
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec
from tinygrad_nv.tile.grouped_gemm.outer_mma import plan as outer_mma
from tinygrad_nv.tile.grouped_gemm.schedules import (
    GroupedGemv,
    GroupedMma,
    GroupedOuterMma,
    GroupedScaledWgmma,
    GroupedWgmma,
)
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec, ScaledGroupedGemmSpec
from tinygrad_nv.tile.grouped_gemm.wgmma import cost as wgmma_cost
from tinygrad_nv.tile.grouped_gemm.wgmma import defaults as wgmma_defaults
from tinygrad_nv.tile.grouped_gemm.wgmma import legality as wgmma_legality
from tinygrad_nv.tile.legality import legality
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU, AnyTemplate, Family, Template, later

TIE = 1.02              # predictions as near as this are the same

GEMV = Template("grouped_gemv", GroupedGemmSpec, GroupedGemv, legality(gemv.problems), gemv.candidates,
                later("tinygrad_nv.tile.grouped_gemm.gemv.kernel", "grouped_gemv"), gemv.cost)
WGMMA = Template("grouped_wgmma", GroupedGemmSpec, GroupedWgmma, legality(wgmma_legality.problems),
                 wgmma_defaults.candidates,
                 later("tinygrad_nv.tile.grouped_gemm.wgmma.kernel", "grouped_wgmma"), wgmma_cost.cost)
SCALED_WGMMA = Template("grouped_scaled_wgmma", ScaledGroupedGemmSpec, GroupedScaledWgmma, WGMMA.problems,
                        wgmma_defaults.scaled_candidates, WGMMA.build, wgmma_cost.cost)
MMA = Template("grouped_mma", GroupedGemmSpec, GroupedMma, legality(mma.problems), mma.candidates,
               later("tinygrad_nv.tile.grouped_gemm.mma.kernel", "grouped_mma"), mma.cost)
OUTER_MMA = Template("grouped_outer_mma", GroupedOuterSpec, GroupedOuterMma, legality(outer_mma.problems),
                     outer_mma.candidates,
                     later("tinygrad_nv.tile.grouped_gemm.outer_mma.kernel", "grouped_outer_mma"),
                     outer_mma.cost)
TEMPLATES: tuple[AnyTemplate, ...] = (GEMV, WGMMA, SCALED_WGMMA, MMA, OUTER_MMA)


@lru_cache(4096)
def _default(spec: GroupedGemmSpec | GroupedOuterSpec, gpu: GPU) -> Schedule | None:
    """The legal candidate of the lowest cost; of the best of templates as near as `TIE`, the first."""
    best = []
    for each in FAMILY.of(type(spec)):
        legal = [(each.cost(spec, s, gpu).seconds, s) for s in each.candidates(spec, gpu)
                 if each.cost is not None and not each.problems(spec, s, gpu)]
        if legal: best.append(min(legal, key=lambda pair: pair[0]))
    least = min((seconds for seconds, _ in best), default=0.0)
    return next((s for seconds, s in best if seconds <= TIE * least), None)


FAMILY = Family("grouped_gemm", TEMPLATES, choose.choose, defaults=_default)
