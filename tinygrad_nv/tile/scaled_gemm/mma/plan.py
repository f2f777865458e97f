"""Plan of `scaled_mma`, which follows from a spec and a schedule.

Protocol: that of gemm/mma/plan.py. A stage is a group of K: a tile of A, one of B, then the scales of the
tile's rows and those of its columns. Each side has a scale of each row, of each block, or one of all where a
block has all rows that there are.

`problems` is what the template asks of a schedule; `candidates` are tiles worth trying first.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import lru_cache

from tinygrad_nv.tile.gemm.cost import resident_ctas
from tinygrad_nv.tile.gemm.mma import template as mma
from tinygrad_nv.tile.gemm.mma.plan import MmaPlan
from tinygrad_nv.tile.gemm.mma.template import REGISTERS_BESIDE, MmaCost
from tinygrad_nv.tile.gemm.schedules import Mma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gemm.work import SCHEDULERS, Ending, Work
from tinygrad_nv.tile.gpu import GPUModel
from tinygrad_nv.tile.scaled_gemm.schedules import STAGE_BYTES, ScaledMma
from tinygrad_nv.tile.scaled_gemm.spec import GROUP, BlockScales, ScaledGemmSpec
from tinygrad_nv.tile.template import GPU

PLACE_BYTES = 16        # what places of scales are multiples of
ARCH = "sm_89"
MOST_SUMS = 64      # of a thread, beside as many of a group
EIGHT, SIXTEEN = 8, 16      # columns and rows of an instruction


@dataclass(frozen=True)
class Side:
    """Scales of one operand: those of a tile's `block` rows, of which a warp has `share`, where a matrix has
    `extent`."""
    scales: BlockScales
    extent: int
    block: int
    share: int

    @property
    def one(self) -> bool:
        """Whether all rows of the tile have one."""
        return self.scales.rows >= min(self.extent, self.block)

    @property
    def each(self) -> bool:
        """Whether each row has its scale."""
        return self.scales.rows == 1 and not self.one

    @property
    def count(self) -> int:
        """Scales of the tile."""
        return 1 if self.one else self.block // self.scales.rows

    @property
    def nbytes(self) -> int:
        """Shared memory of these."""
        return -(-4 * self.count // PLACE_BYTES) * PLACE_BYTES

    def index(self, row: int) -> int:
        """Returns the index of a row of the warp's share, after that of the share's first row."""
        return 0 if self.one else row // self.scales.rows


@dataclass(frozen=True)
class ScaledMmaPlan(MmaPlan):
    """See above."""
    spec: ScaledGemmSpec
    schedule: ScaledMma

    @staticmethod
    @lru_cache(1024)
    def of(spec: ScaledGemmSpec, s: ScaledMma) -> ScaledMmaPlan:
        """The plan; of the transposed matmul where the schedule is swapped."""
        return ScaledMmaPlan(spec.swap_operands() if s.swap else spec, s)

    @property
    def ends_within(self) -> bool:
        """Whether K ends within a group."""
        return self.spec.k % GROUP > 0

    @property
    def row_scales(self) -> Side:
        """Scales of A."""
        return Side(self.spec.a_scale, self.spec.m, self.schedule.block_m, self.warp_m)

    @property
    def column_scales(self) -> Side:
        """Scales of B."""
        return Side(self.spec.b_scale, self.spec.n, self.columns, self.warp_n)

    @property
    def scales_start(self) -> int:
        """Bytes of a stage before its scales."""
        return self.schedule.stage_bytes(self.spec.a.dtype.itemsize)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        nbytes = self.scales_start + self.row_scales.nbytes + self.column_scales.nbytes
        return -(-nbytes // STAGE_BYTES) * STAGE_BYTES

    @property
    def ring_bytes(self) -> int: return self.schedule.depth * self.stage_bytes


def problems(spec: ScaledGemmSpec, s: ScaledMma, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    if arch != ARCH: return [f"mma.sync multiplies 8-bit floats as they are on {ARCH} alone, this is {arch}"]
    if s.swap and spec.symbolic: return ["swap of symbolic rows"]
    plan = ScaledMmaPlan.of(spec, s)
    spec = plan.spec
    out = mma.extent_problems("block_m", s.block_m, s.warps_m, 1, spec.a)
    out += mma.extent_problems("block_n", s.block_n, s.warps_n, 1, spec.b)
    if s.block_k != GROUP: out.append(f"block_k={s.block_k}: a stage is a group of {GROUP}")
    if s.threads > 1024 or s.threads & (s.threads - 1):
        out.append(f"{s.threads} threads are above 1024, or not a power of 2")
    if not 2 <= s.depth <= 8: out.append(f"{s.depth} stages are not 2 to 8")
    if s.splits > plan.iterations: out.append(f"{s.splits} splits of {plan.iterations} groups")
    if spec.k % GROUP and s.splits > 1: out.append(f"splits of k={spec.k}, no whole groups")
    if out: return out
    out += mma.copy_problems(s, "block_m", s.block_m, spec.a) + mma.copy_problems(s, "block_n", s.block_n,
                                                                                    spec.b)
    out += _blocks("block_m", plan.row_scales, SIXTEEN) + _blocks("block_n", plan.column_scales, EIGHT)
    return out + mma.room_problems(plan, arch, plan.stage_bytes, MOST_SUMS)


def _blocks(name: str, side: Side, least: int) -> list[str]:
    """The blocks of scales against the tile, and against a warp's share of it."""
    rows = side.scales.rows
    if side.each or rows >= side.extent: return []
    if rows % least: return [f"scales {side.scales} of {name}: 1 or a multiple of {least}"]
    return [f"{name}={side.block}, {extent} of a {whose}, and scales {side.scales}: neither divides the other"
            for extent, whose in ((side.block, "tile"), (side.share, "warp"))
            if rows % extent and extent % rows][:1]


# rows, columns, warps along both
TILES = ((128, 128, 2, 4), (128, 64, 2, 2), (64, 128, 2, 2), (64, 64, 2, 2), (32, 128, 1, 4), (32, 64, 1, 2),
         (16, 128, 1, 4), (16, 64, 1, 4), (16, 64, 1, 2), (32, 32, 1, 2), (16, 32, 1, 2), (16, 16, 1, 1))


def candidates(spec: ScaledGemmSpec, gpu: GPU) -> tuple[ScaledMma, ...]:
    """The tiles, with the deepest ring that fits, the better known ones before the others; none where
    mma.sync has no 8-bit floats of its own."""
    return _candidates() if gpu.arch == ARCH else ()


@functools.cache
def _candidates() -> tuple[ScaledMma, ...]:
    made = [ScaledMma().block(m, n).warps(warps_m, warps_n) for m, n, warps_m, warps_n in TILES]
    deepest = [schedule.deepest(ARCH, 1) for schedule in made]
    # three stages of the first are all of shared memory, and splits take four bytes more
    return (*deepest, deepest[0].stages(2))


class ScaledMmaCost(MmaCost):
    """An addition in float32 for each sum of a group, and twice as many sums."""

    def work(self, spec: GemmSpec, s: Mma, gpu_model: GPUModel, end: Ending) -> Work:
        done = super().work(spec, s, gpu_model, end)
        return done._replace(issue=done.issue + s.block_m * s.block_n / 32 / SCHEDULERS)

    def resident(self, spec: GemmSpec, s: Mma, gpu_model: GPUModel, registers: int) -> int:
        assert isinstance(spec, ScaledGemmSpec)
        assert isinstance(s, ScaledMma)
        beside = min(255, 2 * s.block_m * s.block_n // s.threads + REGISTERS_BESIDE)
        return resident_ctas(gpu_model, s.threads, 1024 + ScaledMmaPlan.of(spec, s).ring_bytes,
                             registers or beside)
