"""Legality of `gemv`: what it asks of a schedule. float32 is multiplied in float32, with or without
`tf32`."""
from __future__ import annotations

from tinygrad_nv.tile import limits
from tinygrad_nv.tile.gemm.gemv.plan import (
    MOST_LOADED,
    MOST_SUMS,
    OTHER_REGISTERS,
    REGISTERS,
    GemvPlan,
)
from tinygrad_nv.tile.gemm.schedules import MOST_ROWS, Gemv
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.limits import MOST_GRID


def problems(spec: GemmSpec, schedule: Gemv, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    s = schedule
    if s.swap and spec.parts > 1: return [f"the transposed matmul of {spec.parts} parts"]
    if s.swap and spec.symbolic: return ["the transposed matmul would have symbolic columns"]
    if (few := spec.n if s.swap else spec.m) > MOST_ROWS:
        hint = "; n is not: swapped()" if not s.swap and spec.n <= MOST_ROWS else ""
        return [f"{'n' if s.swap else 'm'}={few} is above {MOST_ROWS}{hint}"]
    if s.threads > 1024: return [f"{s.warps_m} warps are {s.threads} threads, at most 1024"]
    plan = GemvPlan.of(spec, s)
    return _block_problems(plan) or _extent_problems(plan, arch)


def _block_problems(plan: GemvPlan) -> list[str]:
    s, out = plan.schedule, []
    if s.block_n % plan.granule:
        out.append(f"block_n={s.block_n} is not a multiple of the {plan.granule} columns of a warp")
    if s.block_k % plan.step:
        out.append(f"block_k={s.block_k} is not a multiple of the {plan.step} of a warp's step")
    return out


def _extent_problems(plan: GemvPlan, arch: str) -> list[str]:
    """Returns the problems of registers, shared memory, grid and offsets, with tiles that are multiples."""
    spec, s, out = plan.spec, plan.schedule, []
    if plan.load_registers > MOST_LOADED:
        out.append(f"{plan.steps} steps × {plan.rows * plan.depth} chunks × {spec.parts} parts × "
                   f"{-(-plan.chunk // 4)} = {plan.load_registers} registers of loads, at most {MOST_LOADED}")
    if plan.sums > MOST_SUMS:
        out.append(f"{plan.warp_n} columns of a warp × {spec.m} rows × {spec.parts} parts = {plan.sums} sums "
                   f"a lane, at most {MOST_SUMS}")
    most = min(255, REGISTERS // s.threads // 8 * 8)
    if plan.registers > most:
        out.append(f"{plan.sums} sums + {plan.load_registers} of loads + {plan.x_registers} of activations + "
                   f"{OTHER_REGISTERS} = {plan.registers} registers, {s.threads} threads have {most} each")
    if plan.smem_bytes > limits.SMEM_BYTES[arch]:
        needed = f"{spec.m} rows × {plan.span} of K × {plan.itemsize} B = {plan.x_bytes} B" \
            if plan.x_bytes >= plan.sums_bytes else f"sums of {plan.warps_k} warps = {plan.sums_bytes} B"
        out.append(f"{needed} of shared memory, {arch} has {limits.SMEM_BYTES[arch]}")
    iterations = plan.full + (plan.tail > 0)
    if s.splits > iterations:
        out.append(f"{s.splits} splits of {spec.k} / {s.block_k} = {iterations} iterations")
    for name, count in (("splits", plan.splits), ("matrices", spec.matrices)):
        if count > MOST_GRID: out.append(f"{count} {name} are above {MOST_GRID}")
    if plan.reach_bytes >= 1 << 31:
        out.append(f"loads of an iteration are {plan.reach_bytes} B apart, at most {(1 << 31) - 1}")
    return out
