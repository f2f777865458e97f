"""The templates of a matmul: gemv/ (few rows), wgmma/ (sm_90a), mma/ (sm_80 and later, any strides).

Of those whose candidates the cost model cannot tell apart, the earlier one is liked better.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad.dtype import dtypes

from tinygrad_nv.lazy_import import lazy_import
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.gemm.analytic import analytic, choose_ordered, starts
from tinygrad_nv.tile.gemm.gemv import template as gemv
from tinygrad_nv.tile.gemm.legality import whole
from tinygrad_nv.tile.gemm.mma import template as mma
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Gemv, Mma, Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gemm.wgmma import template as wgmma
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.order import Ordered
from tinygrad_nv.tile.template import GPU, Family, Template, lazy_build
from tinygrad_nv.tile.templates import TABLE

GEMV = Template("gemv", GemmSpec, Gemv, whole(gemv.problems), gemv.candidates,
                lazy_build("tinygrad_nv.tile.gemm.gemv.kernel", "gemv"), gemv.GemvCost())
WGMMA = Template("wgmma", GemmSpec, Wgmma, whole(wgmma.problems), wgmma.candidates,
                 lazy_build("tinygrad_nv.tile.gemm.wgmma.kernel", "gemm_wgmma"), wgmma.WgmmaCost())
MMA = Template("mma", GemmSpec, Mma, whole(mma.problems), mma.candidates,
               lazy_build("tinygrad_nv.tile.gemm.mma.kernel", "gemm_mma"), mma.MmaCost())


def _why_not(spec: GemmSpec, gpu: GPU) -> str:
    """Why no template takes a matmul; of float32, the setting that decides it."""
    if spec.a.dtype == dtypes.float32 and not spec.tf32: return "float32 without ALLOW_TF32"
    return refusal(spec, gpu)


def _default(spec: GemmSpec, gpu: GPU) -> GemmSchedule | None: return analytic(spec, gpu.arch, gpu.sm_count)


def _choose_ordered(spec: GemmSpec, gpu: GPU) -> Ordered | None:
    return choose_ordered((WGMMA, MMA), spec, gpu, spec)


def refusal(spec: GemmSpec, gpu: GPU) -> str:
    """Returns what each template says of the schedule it likes best; "" where one takes it."""
    if analytic(spec, gpu.arch) is not None: return ""
    if gpu.arch not in SMEM_BYTES: return TABLE.problems(spec, Gemv(), gpu)[0]
    said: dict[str, Sequence[str]] = {}
    for s in (*starts(spec, gpu), Gemv()):  # gemv has none for many rows
        found = TABLE.problems(spec, s, gpu)
        if s.template not in said or len(found) < len(said[s.template]): said[s.template] = found
    return "; ".join(f"{template}: {', '.join(found)}" for template, found in said.items())


FAMILY = Family("gemm", (GEMV, WGMMA, MMA), choose, _why_not, _default,
                lazy_import("tinygrad_nv.tile.gemm.tune:candidates"),
                lazy_import("tinygrad_nv.tile.gemm.tune:counter_cost"), _choose_ordered)
