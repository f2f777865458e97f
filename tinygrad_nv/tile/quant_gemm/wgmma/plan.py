"""Plan of `quant_wgmma`, which follows from a spec and a schedule.

Protocol: that of gemm/wgmma/plan.py, of the transposed matmul: rows are those of the matrix, whose codes and
factors are boxes of a stage, columns are rows of activations. `MatrixStages` is what a plan has beside, whose
operand A is made of a quantised matrix.

`problems` is what the template asks of a schedule. `candidates` are all of a list, tiles, and splits where
there are few of them, ordered by `cycles`: the longest any SM works, by its tensor cores or by the
instructions that make operands, and not less than HBM takes. The timing model, which predicts the same
kernels from their SASS, has the first within 12 % of the best of the list where both were compared.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from tinygrad_nv.ptx.gpcs import most_clusters
from tinygrad_nv.quant.types import TILE, QType, nbytes
from tinygrad_nv.tile import limits
from tinygrad_nv.tile.gemm.wgmma import template as wgmma
from tinygrad_nv.tile.gemm.wgmma.plan import WgmmaPlan
from tinygrad_nv.tile.gpu import GPUModel, gpu_model_for
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.layout import MOST_BOX, OperandTile, choose_major, natural_span, unreachable
from tinygrad_nv.tile.quant_gemm import stages
from tinygrad_nv.tile.quant_gemm.schedules import QuantWgmma
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.quant_gemm.stages import Box, boxes
from tinygrad_nv.tile.template import GPU

PENDING = 2     # groups of wgmmas in flight while the next operands are made
MAP_DTYPES = {1: "u8", 2: "u16", 4: "u32"}  # by size
# sums and operands of a thread, that leave registers for codes and factors
MOST_REGISTERS = 200


class MatrixStages(WgmmaPlan):
    """Stages of a quantised matrix, and of activations. `a` is the operand as registers have it. A tile has
    rows of `halves` matrices, those of one after those of the other."""
    quant: QuantGemmSpec

    @property
    def halves(self) -> int: return 1

    @property
    def stagger_stages(self) -> int: return 0

    @property
    def type(self) -> QType: return self.quant.type

    @property
    def has_row_scales(self) -> bool:
        """Whether a row has several scales, which are multiplied with elements."""
        return bool(self.type.scale.columns)

    # **** shared memory ****

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """Codes and factors of a stage."""
        return boxes(self.quant, self.schedule.block_m, self.schedule.block_k)

    @property
    def matrix_bytes(self) -> int:
        """Shared memory of a stage's boxes."""
        return self.boxes[-1].end

    @property
    def arriving_bytes(self) -> int:
        """Bytes of a stage that are copied."""
        return sum(box.nbytes for box in self.boxes)

    @property
    def b_start(self) -> int:
        """Offset at which stages of activations begin."""
        return -(-self.matrix_bytes * self.schedule.depth // 1024) * 1024

    @property
    def ring_bytes(self) -> int:
        """Shared memory of all stages: boxes first, then activations."""
        return self.b_start + self.schedule.depth * self.b.nbytes

    def map(self, box: Box, shape: tuple[int, ...], pointer: int) -> MapArgument:
        """The tensor map of a box of a buffer of a shape: that of one of the matrices."""
        tiles, *inner = shape
        count = 1
        for extent in inner: count *= extent
        if box.codes: count //= 4
        return MapArgument(pointer, MAP_DTYPES[box.size], (count, tiles), (count * box.size,),
                           (box.inner, box.tiles // self.halves), "none")

    # **** tiles of a warp ****

    @property
    def tiles_apart(self) -> int:
        """Tiles of 16 rows of a stage between those of a consumer and of the next one."""
        return self.rows // self.halves // TILE if self.readers > 1 else 0

    @property
    def warp_tiles(self) -> tuple[int, ...]:
        """Tiles of a warp, one for each 64 rows of its consumer, after the first."""
        each, half = self.subtiles // self.halves, self.schedule.block_m // self.halves // TILE
        return tuple(number // each * half + number % each * 4 for number in range(self.subtiles))


@dataclass(frozen=True)
class QuantWgmmaPlan(MatrixStages):
    """See above."""
    schedule: QuantWgmma
    quant: QuantGemmSpec

    @staticmethod
    @lru_cache(1024)
    def of(quant: QuantGemmSpec, s: QuantWgmma) -> QuantWgmmaPlan:
        """The plan."""
        spec = quant.gemm.swap_operands()
        major = choose_major(spec.b, spec.n, spec.k)[0] or "K"
        row = (s.block_k if major == "K" else s.block_n) * spec.b.dtype.itemsize
        a = OperandTile(spec.a.dtype, "K", s.block_m, s.block_k, 128)
        b = OperandTile(spec.b.dtype, major, s.block_n, s.block_k, natural_span(row))
        return QuantWgmmaPlan(spec, s, a, b, quant)

    @property
    def stage_bytes(self) -> int:
        """Bytes that arrive."""
        return self.arriving_bytes + self.b.nbytes


def problems(spec: QuantGemmSpec, s: QuantWgmma, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    if arch != "sm_90a": return [f"wgmma needs sm_90a, the target is {arch}"]
    if spec.gemm.parts > 1 or spec.gemm.symbolic:
        return ["several parts" if spec.gemm.parts > 1 else "rows known at launch, which would be columns"]
    computed = spec.gemm.swap_operands()
    major, why = choose_major(computed.b, computed.n, computed.k)
    out = [] if major else [why]
    out += unreachable(computed.b, (), 2)
    if found := wgmma.warps(s) or wgmma.extents(s, computed): return out + found
    plan = QuantWgmmaPlan.of(spec, s)
    if s.stream or s.cluster_m * s.cluster_n > 1: out.append("stream-K, or a cluster that shares operands")
    return [*out, *of_stages(plan), *wgmma.swizzle_problems("block_n", plan.b, s), *_room(plan),
            *registers(plan),
            *wgmma.split_problems(plan)]


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


# rows of the matrix, rows of activations, warps, stages of 64 columns (half as many of 128)
TILES = ((128, 256, 12, 5), (128, 256, 12, 4), (256, 128, 12, 6), (128, 192, 12, 5), (128, 128, 12, 6),
         (64, 256, 8, 5), (64, 128, 8, 6), (128, 64, 12, 8), (64, 64, 8, 8), (64, 32, 8, 8), (64, 16, 8, 8),
         (64, 8, 8, 8))
SPLITS = (1, 2, 4, 8)
TENSOR = 0.93           # of the tensor cores' peak that a loop sustains
INSTRUCTIONS = 2.0      # for each weight that becomes an operand, scales among them
OVERLAP = 0.2           # of the lesser of the two that is not hidden
STAGE_CYCLES = 60       # a stage's barriers and first reads, where no other warpgroup has work
TILE_CYCLES = 2000      # prologue and epilogue of a tile
JOIN_CYCLES = 1500      # sums of a cluster
HBM = 0.86              # of peak


def candidates(spec: QuantGemmSpec, gpu: GPU) -> list[QuantWgmma]:
    """The best first; none where there is no wgmma."""
    if gpu.arch != "sm_90a" or spec.gemm.symbolic or spec.gemm.parts > 1: return []
    return list(_candidates(spec, gpu_model_for(gpu.arch, gpu.sm_count)))


@lru_cache(1024)
def _candidates(spec: QuantGemmSpec, gpu: GPUModel) -> tuple[QuantWgmma, ...]:
    made = []
    for rows, columns, warps, most in TILES:
        if columns > 2 * spec.gemm.m and columns > 8: continue
        for block_k, depth in ((128, max(most // 2 + 1, 3)), (128, 4), (64, most)):
            base = QuantWgmma().block(rows, columns).k(block_k).warps(warps).stages(depth)
            made += [base.split(splits) for splits in SPLITS]
    return tuple(sorted(dict.fromkeys(made), key=lambda s: cycles(spec, s, gpu)))


def cycles(spec: QuantGemmSpec, s: QuantWgmma, gpu: GPUModel) -> float:
    """An estimate, for the order of candidates."""
    gemm, plan = spec.gemm, QuantWgmmaPlan.of(spec, s)
    tensor = s.block_m * s.block_n * s.block_k / (gpu.tensor_fma * TENSOR)
    made = s.block_m * s.block_k * INSTRUCTIONS / 128
    stage = max(tensor, made) + OVERLAP * min(tensor, made)
    stages = plan.iterations / s.splits
    tiles = -(-gemm.n // s.block_m) * -(-gemm.m // s.block_n)
    apart = STAGE_CYCLES if s.consumers == 1 else STAGE_CYCLES / 2
    alone = stages * (stage + apart) + TILE_CYCLES
    if s.splits == 1: busy = -(-tiles // gpu.sm_count) * alone
    else:
        smem = plan.ring_bytes + plan.store.smem_bytes + 2048
        here = 1 if s.consumers > 1 else max(1, min(4, gpu.smem_of_sm // smem))
        clusters = max(most_clusters(s.splits, gpu.sm_count), 1)
        here = min(here, -(-tiles // clusters))
        waves = -(-tiles // (clusters * here))
        busy = waves * (max(alone, here * stages * stage + TILE_CYCLES) + JOIN_CYCLES)
    moved = nbytes(spec.type, *spec.shape) + 2 * gemm.m * (gemm.n + gemm.k)
    hbm = moved / (gpu.hbm_bytes_per_s * HBM) * gpu.clock_hz
    return max(busy, hbm) + 0.2 * min(busy, hbm)
