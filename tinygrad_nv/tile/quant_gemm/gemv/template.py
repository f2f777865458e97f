"""Schedules of `quant_gemv`: `problems`, what it asks of one; `candidates`, those worth trying first."""
from __future__ import annotations

from tinygrad_nv.tile import limits
from tinygrad_nv.tile.gemm.schedules import MOST_ROWS
from tinygrad_nv.tile.limits import MOST_GRID, SMEM_BYTES
from tinygrad_nv.tile.quant_gemm.gemv.plan import OTHER_REGISTERS, REGISTERS, QuantGemvPlan
from tinygrad_nv.tile.quant_gemm.schedules import QuantGemv
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.template import GPU


def problems(spec: QuantGemmSpec, s: QuantGemv, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    gemm = spec.gemm
    apart = [f"{gemm.parts} parts of n={gemm.n}, no multiple of 16"] if gemm.parts > 1 and gemm.n % 16 else []
    return apart + matrix_problems(spec, s, arch)


def matrix_problems(spec: QuantGemmSpec, s: QuantGemv, arch: str) -> list[str]:
    """The same where each part begins with a tile of its own."""
    gemm, plan = spec.gemm, QuantGemvPlan.of(spec, s)
    if gemm.m > MOST_ROWS: return [f"m={gemm.m} is above {MOST_ROWS}"]
    if s.threads > 1024: return [f"{s.warps_m} warps are {s.threads} threads, at most 1024"]
    out = []
    if not plan.groups and spec.type.mins: out.append("minima of whole rows")
    most = min(255, REGISTERS // s.threads // 8 * 8)
    if plan.registers > most:
        out.append(f"{s.units} units × {s.tiles} tiles + sums of {gemm.m} rows + {OTHER_REGISTERS} = "
                   f"{plan.registers} registers, {s.threads} threads have {most} each")
    if plan.smem_bytes > limits.SMEM_BYTES[arch]:
        out.append(f"{gemm.m} rows × {plan.pitch_bytes} B, or their sums, = {plan.smem_bytes} B of shared "
                   f"memory, {arch} has {limits.SMEM_BYTES[arch]}")
    if s.splits > plan.iterations:
        out.append(f"{s.splits} splits of {plan.total_units} units / {s.units} = {plan.iterations} "
                   "iterations")
    if plan.splits > MOST_GRID: out.append(f"{plan.splits} splits are above {MOST_GRID}")
    return out


def candidates(spec: QuantGemmSpec, gpu: GPU) -> list[QuantGemv]:
    """None for many rows; split where the activations do not fit in a third of the shared memory."""
    if spec.gemm.m > MOST_ROWS: return []
    made = []
    # from 5 rows on, two tiles share what is read of activations
    first = ((2, 2, 8), (1, 2, 8)) if spec.gemm.m > 4 else ((1, 2, 8), (2, 2, 8))
    for tiles, units, warps in (*first, (1, 1, 8), (1, 1, 4), (1, 1, 1)):
        base = QuantGemv().of(tiles, units).warps(warps)
        plan = QuantGemvPlan.of(spec, base)
        splits = -(-plan.smem_bytes * 3 // SMEM_BYTES[gpu.arch])
        made.append(base.split(min(splits, plan.iterations)))
    return made
