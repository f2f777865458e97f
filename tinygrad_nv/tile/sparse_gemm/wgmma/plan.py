"""Plan of `sparse_wgmma`, which follows from a spec and a schedule.

Protocol: that of gemm/wgmma/plan.py, of the transposed matmul: rows are those of the sparse matrix. A stage
has `block_k` of its columns: half as many values, all of the activations, and metadata.

`problems` is what the template asks of a schedule. `candidates` are all of a list, tiles, and splits where
there are few of them, ordered by `cycles`: the longest that any SM works, and not less than HBM takes.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from tinygrad_nv.ptx.gpcs import most_clusters
from tinygrad_nv.quant.sparse import UNIT
from tinygrad_nv.tile import limits
from tinygrad_nv.tile.gemm.spec import FP8
from tinygrad_nv.tile.gemm.wgmma import template as wgmma
from tinygrad_nv.tile.gemm.wgmma.plan import PROMOTED_K, WgmmaPlan
from tinygrad_nv.tile.gpu import GPUModel, gpu_model_for
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.layout import K_BYTES, OperandTile, choose_major, natural_span, unreachable
from tinygrad_nv.tile.sparse_gemm.schedules import SparseWgmma
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec, metadata_bytes, steps_of_unit
from tinygrad_nv.tile.template import GPU


@dataclass(frozen=True)
class SparseWgmmaPlan(WgmmaPlan):
    """See above. `a` are values."""
    schedule: SparseWgmma
    sparse: SparseGemmSpec

    @staticmethod
    @lru_cache(1024)
    def of(sparse: SparseGemmSpec, s: SparseWgmma) -> SparseWgmmaPlan:
        """The plan."""
        spec = sparse.gemm.swap_operands()
        major = choose_major(spec.b, spec.n, spec.k)[0] or "K"
        size = spec.a.dtype.itemsize
        row = (s.block_k if major == "K" else s.block_n) * size
        a = OperandTile(spec.a.dtype, "K", s.block_m, s.block_k // 2, natural_span(s.block_k // 2 * size))
        b = OperandTile(spec.b.dtype, major, s.block_n, s.block_k, natural_span(row))
        return SparseWgmmaPlan(spec, s, a, b, sparse)

    @property
    def steps(self) -> int: return self.a.k * self.a.size // K_BYTES

    @property
    def unit_steps(self) -> int:
        """wgmmas of a unit of 64 columns."""
        return steps_of_unit(self.a.size)

    @property
    def units(self) -> int:
        """Units of a stage."""
        return self.schedule.block_k // UNIT

    @property
    def shape(self) -> str: return f"m64n{self.schedule.block_n}k{2 * K_BYTES // self.a.size}"

    @property
    def pending(self) -> int:
        """Groups of wgmmas in flight while the next metadata is read."""
        return min(self.units - 1, 1)

    @property
    def metadata_bytes(self) -> int:
        """Bytes of a stage's metadata."""
        return metadata_bytes(self.schedule.block_m, self.schedule.block_k)

    @property
    def stage_bytes(self) -> int: return self.a.nbytes + self.b.nbytes + self.metadata_bytes

    @property
    def metadata_map(self) -> MapArgument:
        """The tensor map of metadata, the third of the kernel's operands."""
        tiles, units, lanes = self.sparse.buffers["metadata"].shape
        return MapArgument(3, "u32", (units * lanes, tiles), (units * lanes * 4,),
                           (self.units * lanes, self.schedule.block_m // 16), "none")

    @property
    def stagger_stages(self) -> int: return 0


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
