"""The templates of matmuls with scales of groups on GPUs: wgmma (sm_90a), mma/ (sm_89)."""
from __future__ import annotations

from tinygrad_nv.lazy_import import lazy_import
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.gemm.analytic import analytic, choose_ordered
from tinygrad_nv.tile.gemm.legality import whole
from tinygrad_nv.tile.gemm.schedules import GemmSchedule
from tinygrad_nv.tile.gemm.wgmma.template import WgmmaCost
from tinygrad_nv.tile.order import Ordered
from tinygrad_nv.tile.scaled_gemm import plan, schedules
from tinygrad_nv.tile.scaled_gemm.mma import plan as mma
from tinygrad_nv.tile.scaled_gemm.mma.plan import ScaledMmaCost
from tinygrad_nv.tile.scaled_gemm.spec import ScaledGemmSpec
from tinygrad_nv.tile.template import GPU, Family, Template, lazy_build

WGMMA = Template("scaled_wgmma", ScaledGemmSpec, schedules.ScaledWgmma, whole(plan.problems),
                 schedules.candidates, lazy_build("tinygrad_nv.tile.scaled_gemm.kernel", "scaled_wgmma"),
                 WgmmaCost())
MMA = Template("scaled_mma", ScaledGemmSpec, schedules.ScaledMma, whole(mma.problems),
               mma.candidates, lazy_build("tinygrad_nv.tile.scaled_gemm.mma.kernel", "scaled_mma"),
               ScaledMmaCost())


def _default(spec: ScaledGemmSpec, gpu: GPU) -> GemmSchedule | None:
    return analytic(spec, gpu.arch, gpu.sm_count)


def _choose_ordered(spec: ScaledGemmSpec, gpu: GPU) -> Ordered | None:
    return choose_ordered((WGMMA, MMA), spec, gpu, spec)


FAMILY = Family("scaled_gemm", (WGMMA, MMA), choose, None, _default,
                lazy_import("tinygrad_nv.tile.gemm.tune:candidates"),
                lazy_import("tinygrad_nv.tile.gemm.tune:counter_cost"), _choose_ordered)
