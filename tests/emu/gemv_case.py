"""Schedules for tests of gemv: what the cost model likes best of them, and any that a plan allows."""
from __future__ import annotations

from tinygrad_nv.tile.cost import Model
from tinygrad_nv.tile.defaults import few_rows
from tinygrad_nv.tile.legality import problems
from tinygrad_nv.tile.machine import machine_for
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.space import filling
from tinygrad_nv.tile.spec import GemmSpec
from tinygrad_nv.tile.templates.gemv_plan import Plan

GEMV = Schedule().using("gemv")


def best(spec: GemmSpec, arch: str, sm_count: int = 0) -> Schedule:
    """The schedule that is predicted to be the fastest, whatever other templates could do."""
    machine = machine_for(arch, sm_count)
    model = Model(spec, machine)
    all_ = [s for start in few_rows(spec, arch) for s in filling(start, spec, machine.sm_count)]
    return min((s for s in all_ if not problems(s, spec, arch)), key=lambda s: model.predict(s).seconds)


def scheduled(spec: GemmSpec, granules: int, steps: int, warps: int, splits: int) -> Schedule:
    """A schedule in units of what the product's plan has."""
    plan = Plan.of(spec, GEMV)
    return GEMV.block(spec.m, plan.granule * granules).k(plan.step * steps).warps(warps).split(splits)
