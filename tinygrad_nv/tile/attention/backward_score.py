"""Scores and their derivatives in a backward pass, on transposed fragments: keys down, rows across.

Protocol: for each block, `cells, slopes = scores.score_and_slope(sums, base)`, where `base` (s32) is the
first row. `exp2(factor · cell − l · log2 e)` is p. What ∂score/∂sum is beyond the number `slope` is in
`slopes`; None where that is all of it. A score that is a positive multiple of the sum costs nothing: its
cells are the sums.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.attention.backward_mma.rows import RowBlockPosition
from tinygrad_nv.tile.attention.band import BlockRange, Interval
from tinygrad_nv.tile.attention.derivative import derivative
from tinygrad_nv.tile.attention.score import AccFragment, Extents, Scores, as_s32, is_whole, registers
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.epilogue import EpilogueEmitter
from tinygrad_nv.tile.expression import Constant, loads, transpose

FAR = 1 << 30  # beyond all places


def values_of(cells: AccFragment) -> Iterator[Value]:
    """All registers of cells."""
    return (value for row in cells for cell in row for value in cell)


@dataclass
class TransposedScores(Scores):
    """Scores of a warp's keys, from `first` (u32) on."""

    @staticmethod
    def of_spec(kb: Kernel, spec: AttentionSpec, extents: Extents, extras: Sequence[Value],
                batch: Sequence[Value], first: Value, keys: int, rows: int) -> TransposedScores:
        """Returns the scores of blocks of `keys` by `rows`."""
        other = replace(spec, s_q=spec.s_kv, s_kv=spec.s_q, score=transpose(spec.score),
                        band=spec.band.transpose(), start=0, symbolic=())
        return TransposedScores(kb, other, Extents(extents.s_kv, extents.s_q, extents.start), extras, batch,
                            first,
                            keys, rows)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.derivative = derivative(self.spec.score)
        self.slope = float(self.derivative.value) if isinstance(self.derivative, Constant) else 1.0

    def prepare_for(self, position: RowBlockPosition) -> None:
        """Addresses that are the same for all query heads, ahead of the loop over blocks of `position`."""
        self.batch = [*self.batch[:2], position.query]
        self.prepare([load for load in loads(self.spec.score) if not (load.batch and load.batch[2])])

    def _lane_range(self, row: Value, own: Value) -> BlockRange:
        """Returns the rows that see a lane's first key. Rows after the last have no share where sums are
        scores."""
        rows, start = self.extents.s_kv, as_s32(self.extents.start)
        end = None if self.linear or is_whole(rows, self.block_n) else as_s32(rows) - own
        return BlockRange.of_keys(registers(self.kb), self.spec.band.transpose(), row, 1, end, 1, start)

    def _hide_missing(self, seen: Interval, down: int) -> Interval:
        """Returns what sees the key that is `down` after the lane's first: no row, where there is no such
        key."""
        if is_whole(self.extents.s_q, self.block_m): return seen
        begin = 0 if seen.begin is None else seen.begin
        return replace(seen, begin=self.kb.select(self.row + down < self.extents.s_q, begin, FAR, "s32"))

    def score_and_slope(self, sums: AccFragment, base: Value) -> tuple[AccFragment, AccFragment | None]:
        """Scores of sums, and slopes."""
        if self.linear: return sums, None
        kb, same = self.kb, isinstance(self.derivative, Constant)
        self.sums_of, self.at = sums, base.to("u32") + self.column
        finish = EpilogueEmitter(kb, self.spec.score, self, before=() if same else (self.derivative,))
        scores: AccFragment = [[[] for _ in row] for row in sums]
        slopes: AccFragment = [[[] for _ in row] for row in sums]
        for i, row in enumerate(sums):
            for j in range(len(row)):
                for h in range(2):
                    values = finish.all(16 * i + 8 * h, 8 * j)
                    for made, node in ((scores, self.spec.score), (slopes, self.derivative)):
                        if node in values:
                            made[i][j] += [kb.reg("f32", each) for each in self._two(values[node])]
        return scores, None if same else slopes
