"""For tests of gemv: schedules, what the cost model likes best of them and any that a plan allows, and a
check that integers come out exactly."""
from __future__ import annotations

import torch
from gemm_case import arguments, reference, run
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.gemm.cost import CostModel
from tinygrad_nv.tile.gemm.gemv.defaults import candidates
from tinygrad_nv.tile.gemm.gemv.plan import GemvPlan
from tinygrad_nv.tile.gemm.schedules import Gemv
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gpu import machine_for
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

ARCHES = ["sm_80", "sm_89", "sm_90a"]
DTYPES = [dtypes.bfloat16, dtypes.float16, dtypes.float32, dtypes.fp8e4m3, dtypes.fp8e5m2, dtypes.int8,
          dtypes.uint8]
GEMV = Gemv()


def best(spec: GemmSpec, arch: str, sm_count: int = 0) -> Gemv:
    """The schedule that is predicted to be the fastest, whatever other templates could do."""
    machine = machine_for(arch, sm_count)
    model = CostModel(spec, machine)
    all_ = [s for start in candidates(spec, GPU(arch)) for s in start.filling(spec, machine.sm_count)]
    legal = (s for s in all_ if not TABLE.problems(spec, s, GPU(arch)))
    return min(legal, key=lambda s: model.predict(s).seconds)


def scheduled(spec: GemmSpec, granules: int, steps: int, warps: int, splits: int) -> Gemv:
    """A schedule in units of what the product's plan has."""
    plan = GemvPlan.of(spec, GEMV)
    return GEMV.columns(plan.granule * granules).k(plan.step * steps).warps(warps).split(splits)


def exact(dtype: DType) -> DType:
    """A result that holds sums of integers."""
    return dtypes.int32 if dtypes.is_int(dtype) else dtypes.float32


def check(spec: GemmSpec, schedule: Gemv, arch: str, seed: int = 0, m: int | None = None) -> None:
    """Integers come out exactly."""
    given_ = arguments(spec, seed)
    got = run(TABLE.build(spec, schedule, GPU(arch)), spec, given_, arch, seed, m)
    assert torch.equal(got, reference(spec, given_)[..., :m or spec.m, :])
