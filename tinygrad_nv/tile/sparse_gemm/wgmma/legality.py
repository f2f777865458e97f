"""Legality of `sparse_wgmma`: what it asks of a schedule."""
from __future__ import annotations

from dataclasses import replace

from tinygrad_nv.quant.sparse import UNIT
from tinygrad_nv.tile import limits
from tinygrad_nv.tile.gemm.spec import FP8
from tinygrad_nv.tile.gemm.wgmma import legality as gemm
from tinygrad_nv.tile.gemm.wgmma.plan import PROMOTED_K
from tinygrad_nv.tile.sparse_gemm.schedules import SparseWgmma
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec
from tinygrad_nv.tile.sparse_gemm.wgmma.plan import SparseWgmmaPlan
from tinygrad_nv.tile.wgmma_tiles import choose_major, unreachable


def problems(spec: SparseGemmSpec, s: SparseWgmma, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    if arch != "sm_90a": return [f"wgmma needs sm_90a, the target is {arch}"]
    if spec.gemm.symbolic: return ["rows known at launch, which would be columns"]
    computed = spec.gemm.swap_operands()
    stored = replace(computed, k=computed.k // 2, a=spec.values)
    out = []
    for operand, extent, k in ((spec.values, computed.m, stored.k), (computed.b, computed.n, computed.k)):
        major, why = choose_major(operand, extent, k)
        out += ([] if major else [why]) + unreachable(operand, (), 2)
    if found := gemm.warps(s) or gemm.extents(s, computed): return out + found
    if found := _stage(spec, s): return out + found
    plan = SparseWgmmaPlan.of(spec, s)
    return [*out, *gemm.swizzle_problems("block_m", plan.a, s), *gemm.swizzle_problems("block_n", plan.b, s),
            *_room(plan), *gemm.cluster(plan), *gemm.split_problems(plan)]


def _stage(spec: SparseGemmSpec, s: SparseWgmma) -> list[str]:
    """Columns of a stage."""
    if s.block_k % UNIT: return [f"block_k={s.block_k} is not a multiple of the unit's {UNIT} columns"]
    if spec.gemm.a.dtype in FP8 and s.block_k != 2 * PROMOTED_K:
        return [f"block_k={s.block_k}: fp8 sums go to float32 after {2 * PROMOTED_K} columns, a stage"]
    if s.stream: return ["stream-K"]
    if s.swizzle_width: return [f"swizzle {s.swizzle_width}: the widest"]
    return []


def _room(plan: SparseWgmmaPlan) -> list[str]:
    """Shared memory and registers."""
    out, s = [], plan.schedule
    staging, most = -(-plan.store.smem_bytes // 1024) * 1024, limits.SMEM_BYTES["sm_90a"]
    tiles = sum(-(-tile.nbytes * s.depth // 1024) * 1024 for tile in (plan.a, plan.b))
    needed = tiles + plan.metadata_bytes * s.depth + staging + plan.barrier_bytes
    if needed > most:
        out.append(f"{s.depth} stages × {plan.stage_bytes} B + {staging} B to store from + "
                   f"{plan.barrier_bytes} B of barriers = {needed} B of shared memory, sm_90a has {most}")
    if plan.sums > plan.most_sums:
        out.append(f"{plan.sums} sums a thread, at most {plan.most_sums} with {plan.consumers} consumers")
    return out
