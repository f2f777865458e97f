"""Tile scheduler of attention: tiles of `block_m` rows of one head each.

Protocol. Where all tiles fit on the GPU at once each CTA has one, and its place in the grid says which: x
counts blocks of rows, y heads, z the batch. Else CTAs are persistent, one for each multiprocessor. Where
tiles are of one length they are numbered head by head, so that those that run together read the keys of few
heads, and CTA c of n has tiles c, n + c, 2n + c, …

Where one end of the band is open, tiles differ in length. Heads are taken in parts. Tiles of a part are
numbered the longest first (LPT), the heads of a block of rows side by side, and every other n tiles are dealt
from the last CTA to the first, so that the one that had the longer tile has the shorter one next. Each part
is dealt anew, in the order opposite to that of the part before: CTAs that had less of one have more of the
next. A part is at most as many key heads, with their query heads, as have their keys and values in L2
together, as in FlashAttention-3's scheduler; fewer where CTAs have about as even a share then (`part_of`).
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.attention.band import INTEGERS, BlockRange
from tinygrad_nv.tile.attention.wgmma.plan import FlashWgmmaPlan

L2_BYTES = 32 << 20  # of the 50 MiB that an H100 has: the rest is for queries, results and what is ahead
WORTH = 0.1          # of the longest CTA's time, beyond which its keys may come from HBM
SLACK = 0.03         # that the longest CTA may have more, for keys that come from L2
MOST_TRIED = 64      # sizes of parts


@dataclass(frozen=True)
class AttentionTile:
    """The first row of a tile, and the indices of its head: batch, key head, query head of the key head
    (u32)."""
    row: Value
    batch: tuple[Value, Value, Value]


class AttentionTileScheduler:
    """The walk over the tiles of a plan, of `s_q` rows a head."""

    def __init__(self, kb: Kernel, plan: FlashWgmmaPlan, s_q: Value | int) -> None:
        self.kb, self.plan, self.heads = kb, plan, plan.spec.matrices
        m, band = plan.schedule.block_m, plan.spec.band
        self.blocks: Value | int = plan.blocks_of_rows if isinstance(s_q, int) else (s_q + (m - 1)) // m
        self.downwards = band.last is not None  # the last rows have the most to see
        self.uneven = (band.first is None) != (band.last is None)
        self.part = part_of(plan) if self.uneven and plan.ctas else self.heads

    @contextmanager
    def tiles(self) -> Iterator[AttentionTile]:
        """Emits the code inside so that it is done for each tile of this CTA."""
        kb, ctas = self.kb, self.plan.ctas
        if not ctas:
            group = self.plan.spec.batch[2]
            head = kb.ctaid.y // group
            yield self._tile(kb.ctaid.x, (kb.ctaid.z, head, kb.ctaid.y - head * group))
            return
        first, own = kb.reg("u32", 0), self._place()  # head of the part, place in its deal
        if self.part == self.heads:
            with self._deal_tiles(first, own) as tile: yield tile
            return
        with kb.while_(lambda: first < self.heads):
            with self._deal_tiles(first, own) as tile: yield tile
            first += self.part
            own.set(ctas - 1 - own)

    @contextmanager
    def _deal_tiles(self, first: Value, own: Value) -> Iterator[AttentionTile]:
        """The tiles of a part, which begins with head `first`, of the CTA at place `own`."""
        kb, ctas, height = self.kb, self.plan.ctas, self._height(first)
        number = kb.reg("u32", own)
        step = 2 * ctas - 1 - 2 * number if self.uneven else kb.reg("u32", ctas)
        total = self.blocks * height
        with kb.while_(lambda: number < total):
            if self.uneven: block, head = self._split(number, height)
            else: head, block = self._split(number, self.blocks)
            yield self._tile(block, self._indices(first + head))
            number += step
            if self.uneven: step.set(2 * ctas - step)

    def _place(self) -> Value:
        """Returns the place of the CTA in the first part's deal: CTA 0, which starts first, has the one with
        the most to do."""
        kb, ctas = self.kb, self.plan.ctas
        place = kb.reg("u32", kb.ctaid.x)
        if not self.uneven: return place
        sums = loads(tuple(tile_lengths(self.plan)), self.heads, self.part, ctas)
        place += int(sums.argmax())
        return kb.select(place < ctas, place, place - ctas, "u32")

    def _height(self, first: Value) -> Value | int:
        """Heads of a part."""
        if self.heads % self.part == 0: return self.part
        height = self.kb.reg("u32")
        self.kb.emit("min.u32", height, self.heads - first, self.part)
        return height

    def _tile(self, block: Value, batch: tuple[Value, Value, Value]) -> AttentionTile:
        if self.downwards: block = self.blocks - 1 - block
        return AttentionTile(block * self.plan.schedule.block_m, batch)

    def _indices(self, head: Value) -> tuple[Value, Value, Value]:
        """Returns the indices of a query head of all."""
        _, keys, group = self.plan.spec.batch
        head, query = self._split(head, group)
        batch, key = self._split(head, keys)
        return batch, key, query

    def _split(self, number: Value, extent: Value | int) -> tuple[Value, Value]:
        """Quotient and remainder."""
        if isinstance(extent, int) and extent == 1: return number, self.kb.reg("u32", 0)
        whole = number // extent
        return whole, number - whole * extent


def heads_together(plan: FlashWgmmaPlan) -> int:
    """Query heads of the key heads whose keys and values fit into L2, at least those of one key head."""
    spec = plan.spec
    nbytes = spec.s_kv * (spec.d * spec.k.dtype.itemsize + spec.d_v * spec.v.dtype.itemsize)
    return min(spec.matrices, max(1, L2_BYTES // nbytes) * spec.batch[2])


def part_of(plan: FlashWgmmaPlan) -> int:
    """Query heads of a part: the fewest with which the CTA with the most to do has not much more than it
    must, since CTAs that read the same keys find them in L2. More than L2 has the keys of only where that
    saves a tenth."""
    heads, group = plan.spec.matrices, plan.spec.batch[2]
    together, lengths = heads_together(plan), tuple(tile_lengths(plan))

    def cost_of_parts(parts: Sequence[int]) -> dict[int, float]:
        some = parts[::-1][::-(-len(parts) // MOST_TRIED)][::-1]
        return {part: float(loads(lengths, heads, part, plan.ctas).max()) for part in some}
    within = cost_of_parts(range(group, together + 1, group))
    beyond = cost_of_parts([*range(together, heads, together), heads])
    found = beyond if min(beyond.values()) < (1 - WORTH) * min(within.values()) else within
    return next(part for part, most in found.items() if most <= (1 + SLACK) * min(found.values()))


@lru_cache(4096)
def loads(lengths: tuple[int, ...], heads: int, part: int, ctas: int) -> np.ndarray:
    """Returns the work of each CTA, by its place in the first part's deal, in blocks of columns; `lengths` of
    the tiles of a head, in the order in which they are dealt."""
    sums, back = np.zeros(ctas, np.int64), False
    for first in range(0, heads, part):
        dealt = np.repeat(np.array(lengths), min(part, heads - first))
        rounds = np.pad(dealt, (0, -len(dealt) % ctas)).reshape(-1, ctas)
        rounds[1::2] = rounds[1::2, ::-1]
        sums += rounds.sum(0)[::-1] if back else rounds.sum(0)
        back = not back
    return sums


def tile_lengths(plan: FlashWgmmaPlan) -> list[int]:
    """Blocks of columns that the tiles of a head see, and one for what a tile takes beside, in the order in
    which they are dealt."""
    spec, m, n = plan.spec, plan.schedule.block_m, plan.schedule.block_n
    tiles = np.arange(0, spec.s_q, m)
    blocks = BlockRange.of_rows(INTEGERS, spec.band, tiles, m, spec.s_q, spec.s_kv, spec.start, n)
    count = blocks.end_block(seen := blocks.visible()) - blocks.first_block(seen)
    made = (1 + np.maximum(np.broadcast_to(count, tiles.shape), 0)).tolist()
    return made if spec.band.last is None else made[::-1]
