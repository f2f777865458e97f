"""The work tiles of a CTA, whose stages are a group's rows.

Protocol: tiles are those of gemm/wgmma, a matrix for each group. A tile has `rows` of its group (u32: the
first, and how many), and as many stages as they fill, at least one. The first stage has what is left of the
rows by `block_k`: all others are full. Where a group's rows lie is read one tile ahead.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.gemm.wgmma.tile_scheduler import PersistentTileScheduler, WorkTile
from tinygrad_nv.tile.grouped_gemm.outer_wgmma.plan import OuterPlan


@dataclass(frozen=True)
class Rows:
    """Rows of a group: the first of all rows, and the end; its stages, of which the first has `residue`
    rows."""
    begin: Value
    end: Value
    stages: Value
    residue: Value


class OuterTileScheduler(PersistentTileScheduler):
    """Tiles of all groups, in the order of groups; `offsets` are the kernel's."""

    def __init__(self, kb: Kernel, plan: OuterPlan, ctas: int, offsets: Value) -> None:
        super().__init__(kb, plan, plan.spec.m, ctas)
        self.offsets = offsets
        self.last = plan.tiles - 1
        self.of_group = plan.tiles // plan.outer.groups

    @contextmanager
    def work_tiles(self, turn: Value | None = None) -> Iterator[WorkTile]:
        """Emits the code inside so that it is done for each tile; its rows are `rows`."""
        kb = self.kb
        ahead = kb.regs("s32", 2)
        self._read(self.first, ahead)
        with kb.loop(self.first, self.total, self.step) as number:
            self.rows = self._rows(kb.reg("s32", ahead[0]), kb.reg("s32", ahead[1]))
            following = kb.reg("u32")
            kb.emit("min.u32", following, number + self.step, self.last)
            self._read(following, ahead)
            yield WorkTile(number, 0, self.rows.stages)

    def _read(self, number: Value, ahead: list[Value]) -> None:
        at = advance(self.kb, self.offsets, number // self.of_group, 4)
        for i, each in enumerate(ahead): self.kb.emit("ld.global.s32", each, at.at(4 * i))

    def _rows(self, begin: Value, end: Value) -> Rows:
        kb, block = self.kb, self.plan.schedule.block_k
        count, stages = kb.reg("s32"), kb.reg("s32")
        kb.emit("max.s32", count, end - begin, 0)
        kb.emit("max.s32", stages, (count + (block - 1)) // block, 1)
        residue = count - (stages - 1) * block
        return Rows(begin.to("u32"), end.to("u32"), stages.to("u32"), residue.to("u32"))
