"""The schedules there are for a product: all that legality accepts, of what is worth writing down.

Protocol: `space(spec, arch, sm_count)` yields legal schedules, each once, in a fixed order. `around(schedule,
spec, sm_count)` is a tile's variants: clusters, splits, stream-K. What is left out on purpose: tiles more
than twice as large as the product, sums beside which ptxas spills a long epilogue, splits that make more CTAs
than two for each SM or sums of fewer than two steps, and rings other than those of `rings`.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tinygrad_nv.tile.gemm.defaults import deepest, starts
from tinygrad_nv.tile.gemm.legality import problems
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gemm.work import columns as columns_of_tile
from tinygrad_nv.tile.gemm.work import ending
from tinygrad_nv.tile.gpu import machine_for
from tinygrad_nv.tile.schedule import Schedule

MMA_EXTENTS = (16, 32, 64, 128, 256)
MMA_WARPS = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2), (4, 4))
WGMMA_ROWS = ((64, 8), (128, 12), (256, 12), (192, 16))     # and how many warps share them
WGMMA_COLUMNS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
LEAST = {"wgmma": (64, 8), "mma": (16, 16)}
# sums of a thread: beside an epilogue of more operations than that; of three consumers, whose 512 threads are
# assembled for 128 registers; and of others
SHORT_ENDING, MOST_SUMS_THEN, MOST_SUMS_OF_THREE, MOST_SUMS = 12, 128, 96, 200
CLUSTERS = ((1, 1), (2, 1), (1, 2))
SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
CLUSTERED_SPLITS = (2, 4, 8)        # of wgmma: they meet in a cluster


def space(spec: GemmSpec, arch: str, sm_count: int = 0) -> Iterator[Schedule]:
    """Every legal schedule."""
    size, seen = spec.a.dtype.itemsize, set()
    sms = machine_for(arch, sm_count).sm_count
    for tile in (*starts(spec, arch), *_all_tiles(spec, arch)):
        if not worthwhile(tile, spec): continue
        for deep in rings(tile, arch, size):
            for schedule in around(deep, spec, sms):
                if schedule in seen: continue
                seen.add(schedule)
                if not problems(schedule, spec, arch): yield schedule


def worthwhile(s: Schedule, spec: GemmSpec) -> bool:
    """Whether the tile is at most twice as large as the product, or the smallest there is, and its sums leave
    registers for the epilogue."""
    if s.template == "gemv": return True
    m, n = (spec.n, spec.m) if s.swap else (spec.m, spec.n)
    least_m, least_n = LEAST[s.template]
    return s.block_m <= max(least_m, 2 * m - 1) and columns_of_tile(spec, s) <= max(least_n, 2 * n - 1) \
        and _roomy(s, spec)


def _roomy(s: Schedule, spec: GemmSpec) -> bool:
    """Whether threads have registers beside their sums. With 128 of them, mma.sync's loop takes all."""
    long = ending(spec).operations > SHORT_ENDING
    if s.template == "mma": return not long or s.block_m * s.block_n < 128 * s.threads
    sums = s.block_m * s.block_n // (128 if s.mode == "pingpong" else 128 * s.consumers)
    if s.consumers == 3: return sums <= MOST_SUMS_OF_THREE
    return sums <= (MOST_SUMS_THEN if long else MOST_SUMS)


def around(s: Schedule, spec: GemmSpec, sm_count: int) -> Iterator[Schedule]:
    """A schedule, and the same with clusters, splits, or stream-K where tiles do not fill the SMs."""
    rows, columns = _tiles(s, spec)
    for cluster in CLUSTERS if s.template == "wgmma" else CLUSTERS[:1]:
        if cluster[0] <= rows and cluster[1] <= columns: yield s.cluster(*cluster)
    count = rows * columns * spec.matrices
    yield from _split(s, spec, 2 * sm_count)
    if s.template == "wgmma" and s.mode == "cooperative" and count % sm_count and count < 8 * sm_count:
        yield s.streamed()


def filling(s: Schedule, spec: GemmSpec, sm_count: int) -> Iterator[Schedule]:
    """A schedule, the same in a cluster, and with as many splits as fill the SMs once."""
    yield s
    if s.template == "wgmma" and max(_tiles(s, spec)) > 1:
        yield s.cluster(2) if _tiles(s, spec)[0] > 1 else s.cluster(1, 2)
    if most := list(_split(s, spec, sm_count)): yield most[-1]


def beside(s: Schedule, spec: GemmSpec) -> list[Schedule]:
    """wgmma tiles of other widths, of which one may leave fewer SMs idle in the last wave."""
    if s.template != "wgmma" or s.block_n < 96: return []
    made = (s.block(s.block_m, columns) for columns in WGMMA_COLUMNS if columns >= 96)
    return [tile for tile in made if worthwhile(tile, spec)]


def _tiles(s: Schedule, spec: GemmSpec) -> tuple[int, int]:
    m, n = (spec.n, spec.m) if s.swap else (spec.m, spec.n)
    return -(-m // s.block_m), -(-n // columns_of_tile(spec, s))


def _split(s: Schedule, spec: GemmSpec, ctas: int) -> Iterator[Schedule]:
    """With more splits, so that CTAs are at most so many and sums of two steps at least. None in ping-pong;
    none of mma.sync with 128 sums a thread, where what a split needs beside them spills."""
    if s.mode == "pingpong" or (s.template == "mma" and s.block_m * s.block_n >= 128 * s.threads): return
    rows, columns = _tiles(s, spec)
    most = min(ctas // (rows * columns * spec.matrices), -(-spec.k // s.block_k) // 2)
    for splits in CLUSTERED_SPLITS if s.template == "wgmma" else SPLITS:
        if s.splits < splits <= most: yield s.split(splits)


def _all_tiles(spec: GemmSpec, arch: str) -> Iterator[Schedule]:
    """Tiles, warps and modes of all templates."""
    size = spec.a.dtype.itemsize
    if arch == "sm_90a":
        base = Schedule().using("wgmma").k(128 // size)
        for rows, warps in WGMMA_ROWS:
            for columns in WGMMA_COLUMNS:
                wide = base.block(rows, columns).warps(warps)
                yield wide
                yield wide.swapped()
                if rows <= 128: yield replace(wide, warps_m=12).pingpong()
    for rows in MMA_EXTENTS:
        for columns in MMA_EXTENTS:
            for k_bytes in (32, 64, 128):
                base = Schedule().block(rows, columns).k(k_bytes // size)
                yield from (base.warps(along_m, along_n) for along_m, along_n in MMA_WARPS)


def rings(tile: Schedule, arch: str, itemsize: int) -> list[Schedule]:
    """With the deepest ring (gemv has none), and those with one and two stages less; mma.sync, of which an SM
    may hold several CTAs, with four and three instead."""
    if tile.template == "gemv": return [tile]
    most = deepest(tile, arch, itemsize).depth
    depths = dict.fromkeys((most, 4, 3) if tile.template == "mma" else (most, most - 1, most - 2))
    return [tile.stages(depth) for depth in depths if 2 <= depth <= most]
