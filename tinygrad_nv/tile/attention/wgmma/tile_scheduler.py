"""Which tiles a CTA makes: `block_m` rows of one head each.

Protocol. Where all tiles fit on the GPU at once each CTA has one, and its place in the grid says which: x
counts blocks of rows, y heads, z the batch. Else CTAs are persistent, one for each multiprocessor, and tiles
are numbered:

    which part of the heads,    then which block of rows,    then which head of the part

CTA c of n has tiles c, n + c, 2n + c, … Where one end of the band is open, tiles differ in length: in a part
the longest come first (LPT), and every other n tiles are dealt from the last CTA to the first, so that who
had the longer tile has the shorter one next. A part is as many key heads, with their query heads, as have
their keys and values in L2 together, as in FlashAttention-3's scheduler; where tiles are of one length it is
a single query head, so that those that run together read the keys of few heads.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.attention.wgmma.plan import FlashWgmmaPlan

L2_BYTES = 32 << 20  # of the 50 MiB that an H100 has: the rest is for queries, results and what is ahead


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
        self.part = heads_together(plan) if self.uneven else 1

    @contextmanager
    def tiles(self) -> Iterator[AttentionTile]:
        """What is written inside is done for each tile of this CTA."""
        kb, ctas = self.kb, self.plan.ctas
        if not ctas:
            group = self.plan.spec.batch[2]
            head = kb.ctaid.y // group
            yield self._tile(kb.ctaid.x, (kb.ctaid.z, head, kb.ctaid.y - head * group))
            return
        number, total = kb.reg("u32", kb.ctaid.x), self.blocks * self.heads
        step = 2 * ctas - 1 - 2 * number if self.uneven else kb.reg("u32", ctas)
        with kb.while_(lambda: number < total):
            yield self._tile(*self._place(number))
            number += step
            if self.uneven: step.set(2 * ctas - step)

    def _tile(self, block: Value, batch: tuple[Value, Value, Value]) -> AttentionTile:
        if self.downwards: block = self.blocks - 1 - block
        return AttentionTile(block * self.plan.schedule.block_m, batch)

    def _place(self, number: Value) -> tuple[Value, tuple[Value, Value, Value]]:
        """Block of rows and head of a tile's number."""
        kb, part, heads = self.kb, self.part, self.heads
        which, rest = self._split(number, self.blocks * part) if part < heads else (kb.reg("u32", 0), number)
        height: Value | int = part
        if heads % part:
            height = kb.reg("u32")
            kb.emit("min.u32", height, heads - which * part, part)
        block, inside = self._split(rest, height)
        head = which * part + inside
        _, keys, group = self.plan.spec.batch
        head, query = self._split(head, group)
        batch, key = self._split(head, keys)
        return block, (batch, key, query)

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
