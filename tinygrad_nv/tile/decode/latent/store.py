"""The end of a split of latents: the result, or the split's part in the workspace.

Protocol: both warpgroups that multiply have half of the columns of each row; a lane has two rows, and pairs
of elements of every 8 columns. The first one's maxima and sums of the rows go through shared memory.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.tile.decode.combine import Workspace, inverse_sum, out_place
from tinygrad_nv.tile.decode.latent.plan import CONSUMERS, ROWS, WARPGROUP, LatentPlan
from tinygrad_nv.tile.decode.latent.tile_scheduler import LatentTile
from tinygrad_nv.tile.decode.plan import Parameters
from tinygrad_nv.tile.lanes import pack

TAKEN, TOTALS = 3, 4    # named barriers, after those of weights


class LatentStore:
    """Store of one warpgroup; `row` (u32) is the first of the lane's two rows among 64."""

    def __init__(self, kb: Kernel, plan: LatentPlan, given: Parameters, totals: Shared,
                 row: Value) -> None:
        self.kb, self.plan, self.given, self.row = kb, plan, given, row
        self.totals = totals.address() + row * 4

    def leave(self, row_max: list[Value], row_sum: list[Value]) -> None:
        """The first warpgroup's, for both, once the other one has those of the work tile before."""
        kb = self.kb
        kb.sync(TAKEN, CONSUMERS * WARPGROUP)
        with kb.if_(kb.special("laneid") % 4 == 0):
            for h in range(2):
                kb.st("shared", "f32", self.totals.at(32 * h), row_max[h])
                kb.st("shared", "f32", self.totals.at(32 * h + 4 * ROWS), row_sum[h])

    def release_panel(self) -> None:
        """The second warpgroup has read what the first left."""
        self.kb.arrive(TAKEN, CONSUMERS * WARPGROUP)

    def store(self, out: list[Value], half: int, tile: LatentTile) -> None:
        """A warpgroup's half."""
        kb, plan = self.kb, self.plan
        kb.sync(TOTALS, CONSUMERS * WARPGROUP)
        column = kb.special("laneid") % 4 * 2 + half * plan.half
        for h in range(2):
            totals = [kb.ld("shared", "f32", self.totals.at(32 * h + 4 * ROWS * i))[0] for i in range(2)]
            number = tile.block * ROWS + (self.row + 8 * h)
            pairs = [out[i + 2 * h:i + 2 * h + 2] for i in range(0, len(out), 4)]
            with kb.if_(number < plan.spec.rows):
                if not plan.workspace_bytes: self._finish(pairs, tile, number, column, *totals)
                else:
                    with kb.if_(tile.span.several): self._leave(pairs, tile, number, column, half, totals)
                    with kb.if_(~tile.span.several): self._finish(pairs, tile, number, column, *totals)

    def _leave(self, pairs: list[list[Value]], tile: LatentTile, number: Value, column: Value, half: int,
               totals: list[Value]) -> None:
        """A row's part."""
        kb, work = self.kb, Workspace(self.kb, self.plan, self.given.workspace)
        index = work.number([tile.request, tile.head], number)
        at = work.sums(index, tile.split) + column.to("u64") * 4
        for j, pair in enumerate(pairs): kb.st("global", "f32", at.at(32 * j), pair)
        if half: return
        with kb.if_(kb.special("laneid") % 4 == 0):
            kb.st("global", "f32", work.stats(index, tile.split).at(), totals)

    def _finish(self, pairs: list[list[Value]], tile: LatentTile, number: Value, column: Value,
                row_max: Value, row_sum: Value) -> None:
        """A row of the result."""
        kb, spec = self.kb, self.plan.spec
        scale = inverse_sum(kb, spec, self.given.sinks, tile.head, number, row_max, row_sum)
        at = out_place(kb, spec, self.given.out, [tile.request, tile.head], number, column)
        for j, pair in enumerate(pairs):
            scaled = pack(kb, [value * scale for value in pair], spec.out.dtype)
            kb.st("global", "b32", at.at(16 * j), scaled)
