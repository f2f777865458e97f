"""The templates of grouped matmuls on GPUs: gemv/ (few rows a group), wgmma/ (sm_90a), mma/ (sm_80 and
later), and outer_wgmma/ and outer_mma/ of the gradients of their matrices. Their costs choose among them."""
from __future__ import annotations

from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.gemm.schedules import Mma, Wgmma
from tinygrad_nv.tile.grouped_gemm.cost import cheapest
from tinygrad_nv.tile.grouped_gemm.gemv import plan as gemv
from tinygrad_nv.tile.grouped_gemm.mma import plan as mma
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec
from tinygrad_nv.tile.grouped_gemm.outer_mma import plan as outer_mma
from tinygrad_nv.tile.grouped_gemm.outer_wgmma import plan as outer_wgmma
from tinygrad_nv.tile.grouped_gemm.schedules import (
    GroupedGemv,
    GroupedMma,
    GroupedOuterMma,
    GroupedOuterWgmma,
    GroupedScaledWgmma,
    GroupedTransposedMma,
    GroupedTransposedWgmma,
    GroupedWgmma,
)
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec, ScaledGroupedGemmSpec, TransposedGroupedSpec
from tinygrad_nv.tile.grouped_gemm.wgmma import plan as wgmma
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU, AnyTemplate, Family, Template, lazy_build, legality

GEMV = Template("grouped_gemv", GroupedGemmSpec, GroupedGemv, legality(gemv.problems), gemv.candidates,
                lazy_build("tinygrad_nv.tile.grouped_gemm.gemv.kernel", "grouped_gemv"), gemv.cost)
WGMMA = Template("grouped_wgmma", GroupedGemmSpec, GroupedWgmma, legality(wgmma.problems),
                 wgmma.candidates,
                 lazy_build("tinygrad_nv.tile.grouped_gemm.wgmma.kernel", "grouped_wgmma"), wgmma.cost)
SCALED_WGMMA = Template("grouped_scaled_wgmma", ScaledGroupedGemmSpec, GroupedScaledWgmma, WGMMA.problems,
                        wgmma.candidates_with_scales, WGMMA.build, wgmma.cost)
MMA = Template("grouped_mma", GroupedGemmSpec, GroupedMma, legality(mma.problems), mma.candidates,
               lazy_build("tinygrad_nv.tile.grouped_gemm.mma.kernel", "grouped_mma"), mma.cost)
OUTER_WGMMA = Template("grouped_outer_wgmma", GroupedOuterSpec, GroupedOuterWgmma,
                       legality(outer_wgmma.problems), outer_wgmma.candidates,
                       lazy_build("tinygrad_nv.tile.grouped_gemm.outer_wgmma.kernel", "grouped_outer_wgmma"),
                       outer_wgmma.cost)
OUTER_MMA = Template("grouped_outer_mma", GroupedOuterSpec, GroupedOuterMma, legality(outer_mma.problems),
                     outer_mma.candidates,
                     lazy_build("tinygrad_nv.tile.grouped_gemm.outer_mma.kernel", "grouped_outer_mma"),
                     outer_mma.cost)
TRANSPOSED_WGMMA = Template("grouped_transposed_wgmma", TransposedGroupedSpec, GroupedTransposedWgmma,
                            WGMMA.problems, wgmma.candidates_transposed, WGMMA.build,
                            wgmma.cost)
TRANSPOSED_MMA = Template("grouped_transposed_mma", TransposedGroupedSpec, GroupedTransposedMma, MMA.problems,
                          mma.candidates_transposed, MMA.build, mma.cost)
TEMPLATES: tuple[AnyTemplate, ...] = (GEMV, WGMMA, SCALED_WGMMA, MMA, TRANSPOSED_WGMMA, TRANSPOSED_MMA,
                                      OUTER_WGMMA, OUTER_MMA)


def _default(spec: GroupedGemmSpec | GroupedOuterSpec, gpu: GPU) -> Schedule | None:
    return cheapest(FAMILY.of(type(spec)), spec, gpu, tile_size)


def tile_size(s: GroupedGemv | Mma | Wgmma) -> int:
    """Rows times columns of a tile."""
    return (s.rows if isinstance(s, GroupedGemv) else s.block_m) * s.block_n


FAMILY = Family("grouped_gemm", TEMPLATES, choose, defaults=_default)
