"""The templates of grouped matmuls on GPUs: wgmma/ (sm_90a). Their costs choose among them."""
from __future__ import annotations

from functools import lru_cache

from tinygrad_nv.tile import choose
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedScaledWgmma, GroupedWgmma
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec, ScaledGroupedGemmSpec
from tinygrad_nv.tile.grouped_gemm.wgmma import cost as wgmma_cost
from tinygrad_nv.tile.grouped_gemm.wgmma import defaults as wgmma_defaults
from tinygrad_nv.tile.grouped_gemm.wgmma import legality as wgmma_legality
from tinygrad_nv.tile.legality import legality
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU, AnyTemplate, Family, Template, later

WGMMA = Template("grouped_wgmma", GroupedGemmSpec, GroupedWgmma, legality(wgmma_legality.problems),
                 wgmma_defaults.candidates,
                 later("tinygrad_nv.tile.grouped_gemm.wgmma.kernel", "grouped_wgmma"), wgmma_cost.cost)
SCALED_WGMMA = Template("grouped_scaled_wgmma", ScaledGroupedGemmSpec, GroupedScaledWgmma, WGMMA.problems,
                        wgmma_defaults.scaled_candidates, WGMMA.build, wgmma_cost.cost)
TEMPLATES: tuple[AnyTemplate, ...] = (WGMMA, SCALED_WGMMA)


@lru_cache(4096)
def _default(spec: GroupedGemmSpec, gpu: GPU) -> Schedule | None:
    """The legal candidate of the lowest cost, the first of equals."""
    legal = [(each.cost(spec, s, gpu).seconds, s) for each in FAMILY.of(type(spec)) if each.cost is not None
             for s in each.candidates(spec, gpu) if not each.problems(spec, s, gpu)]
    return min(legal, key=lambda pair: pair[0])[1] if legal else None


FAMILY = Family("grouped_gemm", TEMPLATES, choose.choose, defaults=_default)
