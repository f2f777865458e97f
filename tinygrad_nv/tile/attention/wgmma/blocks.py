"""Blocks of columns that a CTA's rows see, and those of them that need no mask.

Protocol: `KeyBlocks` is of the rows from `row` on. Blocks are walked downwards from `end` - 1 to `first`, in
at most three runs:

    masked      from the last block down to `plain_end`: the band ends in them, or the keys
    plain       down to `plain_first`: all rows see all of their columns
    masked      down to `first`: the band begins in them

The main loop (main_loop.py) masks the scores of masked runs. Extents are numbers or registers (s32); what is
known is computed here, not in the kernel.
"""
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.attention.document_blocks import Documents
from tinygrad_nv.tile.attention.score import Extents, max_s32, min_s32
from tinygrad_nv.tile.attention.wgmma.plan import FlashWgmmaPlan

Extent = Value | int


class KeyBlocks:
    """The blocks of a CTA, downwards."""

    def __init__(self, kb: Kernel, plan: FlashWgmmaPlan, row: Value, extents: Extents,
                 documents: Documents | None = None) -> None:
        self.kb, self.plan = kb, plan
        s_q, s_kv, start = (each.to("s32") if isinstance(each, Value) else each
                            for each in (extents.s_q, extents.s_kv, extents.start))
        band, n, m = plan.spec.band, plan.schedule.block_n, plan.schedule.block_m
        at = row + start
        self.masks_left = band.first is not None
        self.masks_right = band.last is not None or plan.has_ragged_end
        end: Extent = s_kv
        plain_end: Extent = s_kv // n
        if band.last is not None:
            bottom = row + m  # rows beyond the last one see nothing
            if not isinstance(s_q, int) or s_q % m: kb.emit("min.s32", bottom, bottom, s_q)
            end = self._clamp(bottom + start + band.last, s_kv)
            plain_end = self._clamp(at + (band.last + 1), s_kv) // n
        first: Extent = 0
        plain_first: Extent = 0
        if band.first is not None:
            first = self._clamp(at + band.first) // n
            plain_first = (self._clamp(at + (m - 1 + band.first)) + (n - 1)) // n
        if documents is not None:
            first = max_s32(kb, self._clamp(documents.begin) // n, first)
            plain_first = max_s32(kb, first, plain_first)
            plain_end = max_s32(kb, first, plain_end)
            end = min_s32(kb, documents.end, end)
        self.columns = end  # those before it: no row sees one further on
        self.first, self.end = first, (end + (n - 1)) // n
        self.plain_end, self.plain_first = plain_end, plain_first

    def _clamp(self, column: Value, most: Extent | None = None) -> Value:
        """At least 0, at most `most`."""
        made = self.kb.reg("s32")
        self.kb.emit("max.s32", made, column, 0)
        if most is not None: self.kb.emit("min.s32", made, made, most)
        return made

    @property
    def needs_mask(self) -> bool:
        """Whether any block may need a mask."""
        return self.masks_left or self.masks_right

    @property
    def always(self) -> bool:
        """Whether every CTA has blocks."""
        return isinstance(self.end, int) and isinstance(self.first, int)

    def any(self) -> AbstractContextManager[None]:
        """Emits the code inside for CTAs that have blocks alone."""
        if self.always: return nullcontext()
        return self.kb.if_(self.kb.reg("s32", self.end) > self.first)

    def runs(self) -> list[tuple[Extent, bool]]:
        """Returns the runs of blocks behind the last one, which is masked by itself where `needs_mask` says
        so: the block with which each run ends, and whether it is masked."""
        made: list[tuple[Extent, bool]] = []
        if self.plan.spec.band.last is not None:
            end = self.plain_end
            if self.masks_left:
                end = self.kb.reg("s32")
                self.kb.emit("max.s32", end, self.plain_end, self.first)
            made.append((end, True))
        made.append((self.plain_first, False))
        if self.masks_left: made.append((self.first, True))
        return made
