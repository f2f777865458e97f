"""Legality of `quant_wgmma`: what it asks of a schedule."""
from __future__ import annotations

from tinygrad_nv.tile import limits
from tinygrad_nv.tile.gemm.wgmma import legality as gemm
from tinygrad_nv.tile.quant_gemm import stages
from tinygrad_nv.tile.quant_gemm.schedules import QuantWgmma
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.quant_gemm.wgmma.plan import PENDING, MatrixStages, QuantWgmmaPlan
from tinygrad_nv.tile.wgmma_tiles import MOST_BOX, choose_major, unreachable

# sums and operands of a thread, that leave registers for codes and factors
MOST_REGISTERS = 200


def problems(spec: QuantGemmSpec, s: QuantWgmma, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    if arch != "sm_90a": return [f"wgmma needs sm_90a, the target is {arch}"]
    if spec.gemm.parts > 1 or spec.gemm.symbolic:
        return ["several parts" if spec.gemm.parts > 1 else "rows known at launch, which would be columns"]
    computed = spec.gemm.swap_operands()
    major, why = choose_major(computed.b, computed.n, computed.k)
    out = [] if major else [why]
    out += unreachable(computed.b, (), 2)
    if found := gemm.warps(s) or gemm.extents(s, computed): return out + found
    plan = QuantWgmmaPlan.of(spec, s)
    if s.stream or s.cluster_m * s.cluster_n > 1: out.append("stream-K, or a cluster that shares operands")
    return [*out, *of_stages(plan), *gemm.swizzle_problems("block_n", plan.b, s), *_room(plan),
            *registers(plan),
            *gemm.split_problems(plan)]


def of_stages(plan: MatrixStages) -> list[str]:
    """Stages that are no whole units or blocks, or have too few columns."""
    out = stages.problems(plan.quant, plan.boxes, plan.schedule.block_k)
    for box in plan.boxes:
        if box.inner > MOST_BOX: out.append(f"{box.name}: {box.inner} elements of a box, at most {MOST_BOX}")
    if plan.steps <= PENDING:  # the next operands would be written over those of wgmmas in flight
        out.append(f"{plan.steps} times 16 columns of a stage, {PENDING} of which are in flight")
    if not plan.has_row_scales and plan.type.mins: out.append("minima of whole rows")
    return out


def _room(plan: QuantWgmmaPlan) -> list[str]:
    """Shared memory, and sums."""
    out, s = [], plan.schedule
    staging, most = plan.store.smem_bytes, limits.SMEM_BYTES["sm_90a"]
    needed = plan.ring_bytes + -(-staging // 1024) * 1024 + plan.barrier_bytes
    if needed > most:
        out.append(f"{s.depth} stages of {plan.matrix_bytes} + {plan.b.nbytes} B, {staging} B to store from: "
                   f"{needed} B of shared memory, sm_90a has {most}")
    if plan.sums > plan.most_sums: out.append(f"{plan.sums} sums a thread, at most {plan.most_sums}")
    return out


def registers(plan: MatrixStages) -> list[str]:
    """Sums and operands of a thread."""
    operands = 4 * (PENDING + 1) * plan.subtiles
    if plan.sums + operands <= MOST_REGISTERS: return []
    return [f"{plan.sums} sums and {operands} registers of operands a thread, at most {MOST_REGISTERS}"]
