"""How a matmul is computed: the schedules of its templates.

Protocol: `Mma`, `Wgmma` and `Gemv` have the fields that their kernels read. What legality, cost model and
search ask of any of them are the methods of `GemmSchedule`: the tile of the result that a CTA makes, and
which schedules there are beside one (`stage_variants`, `variants`, `fill_sms`, `width_variants`). What can be
is decided by each template.py, what is good by cost.py.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, ClassVar, Literal, NamedTuple, Self

from tinygrad_nv.ptx.gpcs import most_clusters
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gemm.work import ending
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.schedule import Mode, RowWarps, Schedule, Tiled, Warpgroups, Warps, count_words

Swizzle = Literal["", "32B", "64B", "128B"]

MOST_ROWS = 16                      # of gemv
BARRIER_BYTES = 1024                # of the ring: barriers, and alignment
MMA_EXTENTS = (16, 32, 64, 128, 256)
MMA_WARPS = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2), (4, 4))
WGMMA_ROWS = ((64, 8), (128, 12), (256, 12), (192, 16))     # and how many warps share them
WGMMA_COLUMNS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
# sums of a thread: beside an epilogue of more operations than that; of three consumers, whose 512 threads are
# assembled for 128 registers; and of others
SHORT_ENDING, MOST_SUMS_THEN, MOST_SUMS_OF_THREE, MOST_SUMS = 12, 128, 96, 200
CLUSTERS = ((1, 1), (2, 1), (1, 2))
STREAMED = 0.01                     # of the SMs' time, which must be idle otherwise for stream-K to be tried


class CTATile(NamedTuple):
    """Tile of a CTA: `rows` and `columns` of the result (at most), `width` columns of operand b, which are
    those of all parts."""
    rows: int
    columns: int
    width: int


@dataclass(frozen=True)
class GemmSchedule(Schedule, ABC):
    """`block_k` of the sum at a time. `splits` CTAs share the sum of one tile. `swap` computes the transposed
    product, for few rows."""
    block_k: int = 32
    splits: int = 1
    swap: bool = False
    SPLITS: ClassVar[tuple[int, ...]] = (2, 3, 4, 6, 8, 12, 16, 24, 32)
    ALONE: ClassVar[Mapping[str, Any]] = {"splits": 1}  # what a tile by itself has

    def k(self, k: int) -> Self:
        """Elements of the sum at a time."""
        return replace(self, block_k=k)

    def split(self, count: int) -> Self:
        """CTAs that share one tile's sum."""
        return replace(self, splits=count)

    def swap_operands(self) -> Self:
        """Computes (b aᵀ)ᵀ."""
        return replace(self, swap=True)

    # **** what it takes ****

    @abstractmethod
    def tile(self, spec: GemmSpec) -> CTATile:
        """Returns the tile of a matmul that a CTA makes."""

    @property
    @abstractmethod
    def threads(self) -> int:
        """Threads of a CTA."""

    @property
    def depth(self) -> int:
        """Stages of the ring; 0 where there is none."""
        return 0

    @property
    def group(self) -> int:
        """Rows of tiles that are walked together, for L2."""
        return 1

    @property
    def stream(self) -> bool:
        """Whether all sums are divided evenly among persistent CTAs."""
        return False

    @property
    def cluster_shape(self) -> tuple[int, int]:
        """CTAs along rows and columns that share operands."""
        return 1, 1

    @property
    def cluster_ctas(self) -> int:
        """CTAs of a cluster: those that share operands, or one tile's sum."""
        return 1

    @property
    def turns(self) -> int:
        """Tiles that a CTA works on at once."""
        return 1

    def grid(self, spec: GemmSpec) -> tuple[int, int]:
        """Tiles along the rows and the columns of the computed matmul."""
        m, n = (spec.n, spec.m) if self.swap else (spec.m, spec.n)
        tile = self.tile(spec)
        return -(-m // tile.rows), -(-n // tile.columns)

    # **** which there are beside it ****

    @classmethod
    def every(cls, arch: str, itemsize: int) -> Iterable[Self]:
        """All tiles, warps and modes, with operands of so many bytes; none where the template's defaults are
        all there is."""
        return ()

    @property
    def without_splits(self) -> Self:
        """The same with each tile's sum by one CTA."""
        return replace(self, splits=1)

    @property
    def base_tile(self) -> Self:
        """The tile by itself: neither a cluster nor splits that it could do without."""
        return replace(self, **self.ALONE)

    @property
    def without_stages(self) -> Self:
        """The part that schedules that differ in stages alone have in common."""
        return self

    @property
    def key(self) -> Self:
        """The part that schedules of one tile have in common."""
        return replace(self, **self.ALONE)

    def worthwhile(self, spec: GemmSpec) -> bool:
        """Whether the tile is not much larger than the matmul, and its sums leave registers for the
        epilogue."""
        return True

    def stage_variants(self, arch: str, itemsize: int) -> list[Self]:
        """The same with the rings worth trying, the deepest first."""
        return [self]

    def variants(self, spec: GemmSpec, sm_count: int) -> Iterator[Self]:
        """Itself, and the same with clusters, splits, or stream-K where tiles do not fill the SMs."""
        yield self
        yield from self._split(spec, 2 * sm_count)

    def fill_sms(self, spec: GemmSpec, sm_count: int) -> Iterator[Self]:
        """Itself, the same in a cluster, and with as many splits as fill the SMs once."""
        yield self
        if most := list(self._split(spec, sm_count)): yield most[-1]

    def width_variants(self, spec: GemmSpec) -> list[Self]:
        """Tiles of other widths, of which one may leave fewer SMs idle in the last wave."""
        return []

    def _splittable(self) -> bool: return True

    def _split(self, spec: GemmSpec, ctas: int) -> Iterator[Self]:
        """With more splits, so that CTAs are at most so many and sums of two steps at least."""
        if not self._splittable(): return
        rows, columns = self.grid(spec)
        most = min(ctas // (rows * columns * spec.matrices), -(-spec.k // self.block_k) // 2)
        for splits in self.SPLITS:
            if self.splits < splits <= most: yield self.split(splits)


@dataclass(frozen=True)
class RingSchedule(Tiled, GemmSchedule):
    """A matmul by tiles of shared memory, from a ring of stages, for tensor cores. `group` rows of tiles are
    walked together."""
    group: int = 8
    LEAST: ClassVar[tuple[int, int]]
    MOST_STAGES: ClassVar[int]

    def group_rows(self, rows: int) -> Self:
        """Rows of tiles walked together."""
        return replace(self, group=rows)

    def tile(self, spec: GemmSpec) -> CTATile:
        return CTATile(self.block_m, max(1, self.block_n // spec.parts), self.block_n)

    def stage_bytes(self, itemsize: int) -> int:
        """Bytes of one stage: a tile of A and one of B."""
        return (self.block_m + self.block_n) * self.block_k * itemsize

    def deepest(self, arch: str, itemsize: int) -> Self:
        """With as many stages as fit in shared memory, at most `MOST_STAGES`."""
        fit = (SMEM_BYTES[arch] - BARRIER_BYTES) // self.stage_bytes(itemsize)
        return self.stages(max(2, min(self.MOST_STAGES, fit)))

    @property
    def without_stages(self) -> Self: return self.stages(0)

    @property
    def key(self) -> Self: return replace(self, **self.ALONE, depth=0)

    def worthwhile(self, spec: GemmSpec) -> bool:
        """Whether the tile is at most twice as large as the matmul, or the smallest there is, and its sums
        leave registers for the epilogue."""
        m, n = (spec.n, spec.m) if self.swap else (spec.m, spec.n)
        least_m, least_n = self.LEAST
        return self.block_m <= max(least_m, 2 * m - 1) \
            and self.tile(spec).columns <= max(least_n, 2 * n - 1) \
            and self._roomy(ending(spec).operations > SHORT_ENDING)

    @abstractmethod
    def _roomy(self, long: bool) -> bool:
        """Whether threads have registers for a long epilogue, or for any, beside their sums."""

    def _with_depths(self, most: int, *fewer: int) -> list[Self]:
        depths = dict.fromkeys((most, *fewer))
        return [self.stages(depth) for depth in depths if 2 <= depth <= most]

    def _shape(self, warps: str) -> list[str]:
        return [f"{self.block_m}x{self.block_n}x{self.block_k}", warps, count_words(self.depth, "stage")]


@dataclass(frozen=True)
class Mma(Warps, RingSchedule):
    """mma.sync: each of `warps_m` × `warps_n` warps has its share of a CTA's tile."""
    template: ClassVar[str] = "mma"
    LEAST: ClassVar[tuple[int, int]] = (16, 16)
    MOST_STAGES: ClassVar[int] = 6

    @classmethod
    def every(cls, arch: str, itemsize: int) -> Iterator[Self]:
        for rows in MMA_EXTENTS:
            for columns in MMA_EXTENTS:
                for k_bytes in (32, 64, 128):
                    base = cls().block(rows, columns).k(k_bytes // itemsize)
                    yield from (base.warps(along_m, along_n) for along_m, along_n in MMA_WARPS)

    def stage_variants(self, arch: str, itemsize: int) -> list[Self]:
        """The deepest; four and three stages, since an SM may hold several CTAs."""
        return self._with_depths(self.deepest(arch, itemsize).depth, 4, 3)

    def _roomy(self, long: bool) -> bool:
        """With 128 sums, the loop takes all registers."""
        return not long or self.block_m * self.block_n < 128 * self.threads

    def _splittable(self) -> bool:
        """With 128 sums a thread, what a split needs beside them spills."""
        return self.block_m * self.block_n < 128 * self.threads

    def words(self) -> list[str]:
        made = self._shape(self.warp_words())
        if self.splits > 1: made.append(f"split {self.splits}")
        return [*made, "swapped"] if self.swap else made


@dataclass(frozen=True)
class Wgmma(Warpgroups, RingSchedule):
    """wgmma, sm_90a: one warpgroup loads; `mode` says whether the others share a tile's rows or take turns at
    tiles (ping-pong). `cluster_m` × `cluster_n` CTAs share operands by multicast. `splits` are CTAs of a
    cluster; `stream` divides all sums evenly among persistent CTAs instead (stream-K, Osama et al. 2023).
    `swizzle_width` "" is the widest that the tile allows."""
    block_k: int = 64
    depth: int = 4
    cluster_m: int = 1
    cluster_n: int = 1
    stream: bool = False
    mode: Mode = "cooperative"
    swizzle_width: Swizzle = ""
    template: ClassVar[str] = "wgmma"
    LEAST: ClassVar[tuple[int, int]] = (64, 8)
    MOST_STAGES: ClassVar[int] = 7
    SPLITS: ClassVar[tuple[int, ...]] = (2, 4, 8)       # they meet in a cluster
    ALONE: ClassVar[Mapping[str, Any]] = {"splits": 1, "stream": False, "cluster_m": 1, "cluster_n": 1}

    def cluster(self, m: int, n: int = 1) -> Self:
        """CTAs along rows and columns that share operands."""
        return replace(self, cluster_m=m, cluster_n=n)

    def stream_k(self) -> Self:
        """All sums divided evenly among persistent CTAs."""
        return replace(self, stream=True)

    def pingpong(self) -> Self:
        """Consumers take turns at tiles: one multiplies while the other finishes."""
        return replace(self, mode="pingpong")

    def swizzle(self, width: Swizzle) -> Self:
        """Width of the swizzle of shared memory."""
        return replace(self, swizzle_width=width)

    @property
    def cluster_shape(self) -> tuple[int, int]: return self.cluster_m, self.cluster_n

    @property
    def cluster_ctas(self) -> int: return self.cluster_m * self.cluster_n * self.splits

    @property
    def without_splits(self) -> Self: return replace(self, splits=1, stream=False)

    @property
    def turns(self) -> int: return 2 if self.mode == "pingpong" else 1

    @classmethod
    def every(cls, arch: str, itemsize: int) -> Iterator[Self]:
        base = cls().k(128 // itemsize)
        for rows, warps in WGMMA_ROWS if arch == "sm_90a" else ():
            for columns in WGMMA_COLUMNS:
                wide = base.block(rows, columns).warps(warps)
                yield wide
                yield wide.swap_operands()
                if rows <= 128: yield wide.warps(12).pingpong()

    def stage_variants(self, arch: str, itemsize: int) -> list[Self]:
        """The deepest, and those with one and two stages less."""
        most = self.deepest(arch, itemsize).depth
        return self._with_depths(most, most - 1, most - 2)

    def variants(self, spec: GemmSpec, sm_count: int) -> Iterator[Self]:
        rows, columns = self.grid(spec)
        shared = [self.cluster(*each) for each in CLUSTERS if each[0] <= rows and each[1] <= columns]
        yield from shared
        yield from self._split(spec, 2 * sm_count)
        for each in shared if self._splittable() else ():
            at_once = most_clusters(each.cluster_ctas, sm_count)
            waves = -(-rows // each.cluster_m) * -(-columns // each.cluster_n) * spec.matrices / at_once
            if ceil(waves) > (1 + STREAMED) * waves: yield each.stream_k()

    def fill_sms(self, spec: GemmSpec, sm_count: int) -> Iterator[Self]:
        yield self
        rows, columns = self.grid(spec)
        if max(rows, columns) > 1: yield self.cluster(2) if rows > 1 else self.cluster(1, 2)
        if most := list(self._split(spec, sm_count)): yield most[-1]

    def width_variants(self, spec: GemmSpec) -> list[Self]:
        if self.block_n < 96: return []
        made = (self.block(self.block_m, columns) for columns in WGMMA_COLUMNS if columns >= 96)
        return [tile for tile in made if tile.worthwhile(spec)]

    def _roomy(self, long: bool) -> bool:
        sums = self.block_m * self.block_n // (128 if self.mode == "pingpong" else 128 * self.consumers)
        if self.consumers == 3: return sums <= MOST_SUMS_OF_THREE
        return sums <= (MOST_SUMS_THEN if long else MOST_SUMS)

    def _splittable(self) -> bool: return self.mode == "cooperative"

    def words(self) -> list[str]:
        made = self._shape(self.warp_words())
        if self.cluster_shape != (1, 1): made.append(f"cluster {self.cluster_m}x{self.cluster_n}")
        if self.splits > 1: made.append(f"split {self.splits}")
        return made + [word for word, on in (
            ("stream-K", self.stream), ("ping-pong", self.mode == "pingpong"), ("swapped", self.swap),
            (f"swizzle {self.swizzle_width}", self.swizzle_width)) if on]


@dataclass(frozen=True)
class Gemv(RowWarps, GemmSchedule):
    """Few rows, by `warps_m` warps that stand beside each other along `block_n` columns or along K."""
    block_n: int = 128
    warps_m: int = 8
    template: ClassVar[str] = "gemv"
    UNREAD: ClassVar[tuple[str, ...]] = ("block_m", "depth", "group")

    def columns(self, n: int) -> Self:
        """Columns of a CTA."""
        return replace(self, block_n=n)

    def tile(self, spec: GemmSpec) -> CTATile:
        return CTATile(MOST_ROWS, self.block_n, self.block_n * spec.parts)

    @property
    def base_tile(self) -> Self:
        """Itself: where activations do not fit in shared memory, it needs its splits."""
        return self

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Older entries have warps along two sides, of which only the matmul was read."""
        if type(along_n := data.get("warps_n")) is int and type(data.get("warps_m")) is int:
            data = {**data, "warps_m": data["warps_m"] * along_n, "warps_n": 1}
        return super().from_json(data)

    def words(self) -> list[str]:
        made = [f"{MOST_ROWS}x{self.block_n}x{self.block_k}", self.warp_words()]
        if self.splits > 1: made.append(f"split {self.splits}")
        return [*made, "swapped"] if self.swap else made
