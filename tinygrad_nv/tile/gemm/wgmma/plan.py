"""Plan of `gemm_wgmma`, which follows from a spec and a schedule: tiles, instructions, counts. Numbers only.

Protocol: `WgmmaPlan.of` is for pairs that template.py allows; it computes, and refuses nothing. Both the
check and the kernel take their arithmetic from here.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.gpcs import Clusters, most_clusters
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.schedules import Wgmma
from tinygrad_nv.tile.gemm.spec import FP8, GemmSpec, Operand
from tinygrad_nv.tile.layout import K_BYTES, OperandTile, choose_major, natural_span
from tinygrad_nv.tile.store_plan import StorePlan, StoreTile, store_plan

WARPGROUP = 128  # threads
# registers a thread of the producer and of a consumer, by the number of consumers: together at most 512 for
# the warpgroups' 65536 / 128; one consumer keeps what the compiler gives it
REGISTERS = {1: (0, 0), 2: (40, 232), 3: (32, 160)}
# sums a thread that ptxas was seen to keep without spilling, beside long epilogues; with the second set of
# fp8, which epilogues do not see; and where sums from other CTAs are added
MOST_SUMS, MOST_TWICE, MOST_SHARED = {1: 200, 2: 200, 3: 100}, {1: 200, 2: 200, 3: 128}, 160
PROMOTED_K = 128  # fp8 sums are kept to about 14 bits; after so much of K they go to float32


@dataclass(frozen=True)
class WgmmaPlan:
    """A matmul by a schedule. Rows and columns are the computed matmul's: operands have changed places
    where the schedule is swapped."""
    spec: GemmSpec
    schedule: Wgmma
    a: OperandTile
    b: OperandTile

    @staticmethod
    @lru_cache(1024)
    def of(spec: GemmSpec, schedule: Wgmma) -> WgmmaPlan:
        """The plan; of the transposed matmul where the schedule is swapped."""
        spec = spec.swap_operands() if schedule.swap else spec
        a = _tile(spec.a, spec.m, spec.k, schedule.block_m, schedule)
        b = _tile(spec.b, spec.n, spec.k, schedule.block_n, schedule, spec.parts)
        return WgmmaPlan(spec, schedule, a, b)

    @property
    def pointers(self) -> tuple[int, int]:
        """Numbers of the operand parameters, 0 or 1, that are the left and the right one."""
        return (1, 0) if self.schedule.swap else (0, 1)

    @property
    def pingpong(self) -> bool: return self.schedule.mode == "pingpong"

    @property
    def consumers(self) -> int: return self.schedule.consumers

    @property
    def readers(self) -> int:
        """Consumers that read a stage: all, or the one whose turn it is."""
        return 1 if self.pingpong else self.consumers

    @property
    def rows(self) -> int:
        """Rows of a consumer's share of a tile."""
        return self.schedule.block_m // self.readers

    @property
    def subtiles(self) -> int:
        """wgmmas along the rows of a consumer's share."""
        return self.rows // 64

    @property
    def columns(self) -> int:
        """Columns of the result that a tile has."""
        return self.schedule.block_n // self.spec.parts

    @cached_property
    def store(self) -> StorePlan:
        """How the result is stored: each consumer its rows, 64 at a time."""
        s = self.schedule
        tile = StoreTile(s.block_m * s.cluster_m, self.columns * s.cluster_n, self.consumers, 4, 64,
                         self.columns)
        return store_plan(self.spec.store_target, tile)

    @property
    def steps(self) -> int:
        """wgmmas along the K of a stage."""
        return self.schedule.block_k * self.a.size // K_BYTES

    @property
    def iterations(self) -> int:
        """Stages of one tile."""
        return -(-self.spec.k // self.schedule.block_k)

    @property
    def stage_bytes(self) -> int: return self.a.nbytes + self.b.nbytes

    @property
    def copy_bytes(self) -> int:
        """Bytes of a stage that TMA brings."""
        return self.stage_bytes

    @property
    def barrier_bytes(self) -> int:
        """Two mbarriers a stage, and one for each consumer's turn."""
        return 8 * (2 * self.schedule.depth + (self.consumers if self.pingpong else 0))

    @property
    def needs_promotion(self) -> bool: return self.spec.a.dtype in FP8

    @property
    def sums(self) -> int:
        """Sums a thread holds; fp8 has a second set, of 64 rows."""
        return self.subtiles * self.schedule.block_n // 2 + self.second_sums

    @property
    def second_sums(self) -> int: return self.schedule.block_n // 2 if self.needs_promotion else 0

    @property
    def most_sums(self) -> int:
        """So many it can hold."""
        most = (MOST_TWICE if self.needs_promotion else MOST_SUMS)[self.consumers]
        if self.schedule.splits == 1 and not self.schedule.stream: return most
        return min(MOST_SHARED + self.second_sums, most)

    @property
    def stagger_stages(self) -> int:
        """Stages that the second of two consumers multiplies alone at the end of a tile; 0: both end
        together. A stage is given back when the one after it is issued: the first needs `depth` - 1 of the
        ring to come to its end, and must not come to the next one's before the second has paused. fp8 would
        wait for each of these stages, and splits need the sums of both."""
        s = self.schedule
        apart = s.splits == 1 and not self.needs_promotion
        return min(2, s.depth - 1) if self.readers == 2 and apart and self.iterations >= s.depth else 0

    @property
    def peers(self) -> int:
        """CTAs of the cluster that share an operand with one: those of its row, and of its column."""
        return self.schedule.cluster_m + self.schedule.cluster_n - 1

    @property
    def cluster(self) -> int:
        """CTAs of a cluster: those that share operands, or one tile's sum."""
        return self.schedule.cluster_ctas

    @property
    def threads(self) -> int:
        """Threads of all consumers."""
        return WARPGROUP * self.consumers

    @property
    def tile_bytes(self) -> int:
        """A tile's sums, 4 bytes each."""
        return self.schedule.block_m * self.schedule.block_n * 4

    @property
    def a_rows(self) -> int:
        """Rows of a box of A: the CTAs of a cluster's row bring a part each."""
        return self.a.rows // self.schedule.cluster_n

    @property
    def b_rows(self) -> int:
        """Rows of a box of B: of one of the parts, shared out among the CTAs of a cluster's column."""
        parts = self.spec.parts if self.b.major == "K" else 1
        return self.b.rows // parts // self.schedule.cluster_m

    @property
    def shape(self) -> str:
        """Shape of a wgmma."""
        return f"m64n{self.schedule.block_n}k{K_BYTES // self.a.size}"

    @property
    def types(self) -> str:
        """Types of a wgmma."""
        kinds = [short(operand.dtype) for operand in (self.spec.a, self.spec.b)]
        if self.spec.a.dtype == dtypes.float32: kinds = ["tf32", "tf32"]
        return ".".join(["s32" if self.spec.accumulate == dtypes.int32 else "f32", *kinds])

    @property
    def tiles(self) -> int:
        """Tiles in all (at most), in clusters."""
        return self.extents[0] * self.extents[1] * self.spec.matrices

    def ctas(self, sm_count: int, clusters: Clusters = ()) -> int:
        """CTAs of the grid: persistent, as many as run at once, but for clusters that share a sum, which have
        one tile each."""
        if self.schedule.splits > 1: return self.tiles * self.cluster
        at_once = dict(clusters).get(self.cluster, most_clusters(self.cluster, sm_count))
        most = self.tiles * self.iterations if self.schedule.stream else self.tiles
        return min(most, max(at_once, 1)) * self.cluster

    @property
    def extents(self) -> tuple[int, int]:
        """Tiles along rows (at most) and columns, in clusters."""
        s = self.schedule
        return (-(-self.spec.m // (s.block_m * s.cluster_m)), -(-self.spec.n // (self.columns * s.cluster_n)))


def _tile(operand: Operand, extent: int, k: int, block: int, s: Wgmma, parts: int = 1) -> OperandTile:
    """An operand's tile. The swizzle is the widest whose rows make up the tile's, unless the schedule names
    one."""
    major = choose_major(operand, extent, k)[0] or "K"
    row = (s.block_k if major == "K" else block // parts) * operand.dtype.itemsize
    span = int(s.swizzle_width[:-1]) if s.swizzle_width else natural_span(row)
    return OperandTile(operand.dtype, major, block, s.block_k, span, parts)

