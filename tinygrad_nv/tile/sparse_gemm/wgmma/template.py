"""Schedules of `sparse_wgmma`: `problems`, what it asks of one; `candidates`, those worth trying first:
tiles, and splits where there are few of them.

Protocol: `candidates` are all of a list, ordered by `cycles`: the longest that any SM works, and not less
than HBM takes.
"""
from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tinygrad_nv.ptx.gpcs import most_clusters
from tinygrad_nv.quant.sparse import UNIT
from tinygrad_nv.tile import limits
from tinygrad_nv.tile.gemm.spec import FP8
from tinygrad_nv.tile.gemm.wgmma import template as wgmma
from tinygrad_nv.tile.gemm.wgmma.plan import PROMOTED_K
from tinygrad_nv.tile.gpu import GPUModel, gpu_model_for
from tinygrad_nv.tile.sparse_gemm.schedules import SparseWgmma
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec
from tinygrad_nv.tile.sparse_gemm.wgmma.plan import SparseWgmmaPlan
from tinygrad_nv.tile.template import GPU
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
    if found := wgmma.warps(s) or wgmma.extents(s, computed): return out + found
    if found := _stage(spec, s): return out + found
    plan = SparseWgmmaPlan.of(spec, s)
    return [*out, *wgmma.swizzle_problems("block_m", plan.a, s),
            *wgmma.swizzle_problems("block_n", plan.b, s),
            *_room(plan), *wgmma.cluster(plan), *wgmma.split_problems(plan)]


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


# rows of the matrix, rows of activations, warps
TILES = ((128, 256, 12), (256, 128, 12), (128, 192, 12), (128, 128, 12), (64, 256, 8), (64, 128, 8),
         (128, 64, 12), (64, 64, 8), (128, 32, 12), (64, 32, 8), (64, 16, 8), (64, 8, 8))
SPLITS = (1, 2, 4, 8)
CLUSTERS = ((1, 1), (2, 1), (1, 2))
DEPTHS = (6, 5, 4, 3, 2)
OVERLAP = 0.2           # of the lesser of two that is not hidden
L2 = 50                 # bytes a cycle that come to an SM
LATENCY = 1000          # cycles from a copy's issue to its first bytes, which the ring's other stages hide
STAGE_CYCLES = 60       # a stage's barriers and first reads, where no other warpgroup has work
TILE_CYCLES = 2000      # prologue and epilogue of a tile
JOIN_CYCLES = 1500      # sums of a cluster
HBM = 0.86              # of peak


def candidates(spec: SparseGemmSpec, gpu: GPU) -> list[SparseWgmma]:
    """The best first; none where there is no wgmma."""
    if gpu.arch != "sm_90a" or spec.gemm.symbolic: return []
    return list(_candidates(spec, gpu_model_for(gpu.arch, gpu.sm_count)))


@lru_cache(1024)
def _candidates(spec: SparseGemmSpec, gpu: GPUModel) -> tuple[SparseWgmma, ...]:
    made, size = [], spec.gemm.a.dtype.itemsize
    for rows, columns, warps in TILES:
        if columns > 2 * spec.gemm.m and columns > 8: continue
        # fp8 sums go to float32 after 256 columns; others hide the reads of metadata behind the other
        # consumer's wgmmas, or behind their own of the 64 columns before
        for block_k in (256,) if size == 1 else (64, 128):
            for depth in DEPTHS:
                base = SparseWgmma().block(rows, columns).k(block_k).warps(warps).stages(depth)
                made += [base.split(splits) for splits in SPLITS] + [base.cluster(*c) for c in CLUSTERS[1:]]
    return tuple(sorted(made, key=lambda s: (cycles(spec, s, gpu), -s.depth)))


def cycles(spec: SparseGemmSpec, s: SparseWgmma, gpu: GPUModel) -> float:
    """An estimate, for the order of candidates."""
    gemm, plan, size = spec.gemm, SparseWgmmaPlan.of(spec, s), spec.gemm.a.dtype.itemsize
    tensor = s.block_m * s.block_n * s.block_k // 2 / (gpu.tensor_fma * 2 // size)
    l2 = (plan.a.nbytes / s.cluster_n + plan.b.nbytes / s.cluster_m + plan.metadata_bytes) / L2
    stage = max(max(tensor, l2) + OVERLAP * min(tensor, l2), (LATENCY + l2) / (s.depth - 1))
    alone = plan.iterations / s.splits * (stage + STAGE_CYCLES / s.consumers) + TILE_CYCLES
    if s.splits > 1: alone += JOIN_CYCLES
    at_once = max(most_clusters(plan.cluster, gpu.sm_count), 1)
    busy = -(-plan.tiles // at_once) * alone
    moved = spec.nbytes + gemm.m * (gemm.k * size + gemm.n * gemm.out.dtype.itemsize)
    hbm = moved / (gpu.hbm_bytes_per_s * HBM) * gpu.clock_hz
    return max(busy, hbm) + OVERLAP * min(busy, hbm)
