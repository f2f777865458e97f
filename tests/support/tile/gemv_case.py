"""For tests of gemv: schedules, what the cost model likes best of them and any that a plan allows."""
from __future__ import annotations

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.gemm.cost import CostModel
from tinygrad_nv.tile.gemm.gemv.plan import GemvPlan
from tinygrad_nv.tile.gemm.gemv.template import candidates
from tinygrad_nv.tile.gemm.schedules import Gemv
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

ARCHES = ["sm_80", "sm_89", "sm_90a"]
GEMV = Gemv()


def best(spec: GemmSpec, arch: str, sm_count: int = 0) -> Gemv:
    """The schedule that is predicted to be the fastest, whatever other templates could do."""
    machine = gpu_model_for(arch, sm_count)
    model = CostModel(spec, machine)
    all_ = [s for start in candidates(spec, GPU(arch)) for s in start.fill_sms(spec, machine.sm_count)]
    legal = (s for s in all_ if not TABLE.problems(spec, s, GPU(arch)))
    return min(legal, key=lambda s: model.predict(s).seconds)


def scheduled(spec: GemmSpec, granules: int, steps: int, warps: int, splits: int) -> Gemv:
    """A schedule in units of what the product's plan has."""
    plan = GemvPlan.of(spec, GEMV)
    return GEMV.columns(plan.granule * granules).k(plan.step * steps).warps(warps).split(splits)


def exact(dtype: DType) -> DType:
    """A result that holds sums of integers."""
    return dtypes.int32 if dtypes.is_int(dtype) else dtypes.float32
