"""From the products' registers to p and ds, transposed: a warp has 16 keys, and all rows of a block.

Protocol: registers 4j … 4j + 3 of a fragment are cell j: registers 2h and 2h + 1 are of key g + 8h and of
rows 8j + 2q and 8j + 2q + 1 (g = lane / 4, q = lane % 4). For each part of a block:

    weights.of(s, p, …)         s becomes p = 2^(s · factor − log₂e · l), 0 where a row does not see a key,
                                and `p` the same in 16 bits
    weights.slopes(s, dp, ds)   `ds` becomes s (dp · scale − scale · delta) in 16 bits

A score that is a positive multiple `scale` of the sum costs nothing: factor = scale · log₂e. Another one is
evaluated, and its derivative, with rows and columns exchanged (attention/backward_score.py); where that is
not the same number, `scale`, for all elements, s becomes p times it.

With dropout s is marked (dropout.py), which p times a derivative could not be.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.attention.backward_score import TransposedScores, values_of
from tinygrad_nv.tile.attention.backward_wgmma.plan import BackwardWgmmaPlan
from tinygrad_nv.tile.attention.blocks import RowBlocks
from tinygrad_nv.tile.attention.derivative import derivative
from tinygrad_nv.tile.attention.dropout import TransposedDropout
from tinygrad_nv.tile.attention.score import AccFragment, Extents
from tinygrad_nv.tile.attention.spec import multiple
from tinygrad_nv.tile.expression import Constant
from tinygrad_nv.tile.lanes import FLOAT16S

RowValues = Callable[[int], Sequence[Value]]  # of a fragment's rows, by the number of 16


def scale_of(plan: BackwardWgmmaPlan) -> float:
    """The number that every derivative of a score has as a factor."""
    slope = derivative(plan.spec.forward.score)
    return float(slope.value) if isinstance(slope, Constant) else 1.0


class Weights:
    """p and ds of a warp whose first key is `first` (u32)."""

    def __init__(self, kb: Kernel, plan: BackwardWgmmaPlan, blocks: RowBlocks, extents: Extents,
                 extras: Sequence[Value],
                 seed: Value | None, batch: tuple[Value, Value], first: Value) -> None:
        self.kb, self.plan, self.blocks, self.extents, self.extras = kb, plan, blocks, extents, extras
        self.batch, self.first = batch, first
        self.evaluated = multiple(plan.spec.forward.score) is None
        self.kind = FLOAT16S[plan.spec.forward.q.dtype]
        self.dropout: TransposedDropout | None = None
        if seed is not None:
            self.dropout = TransposedDropout(kb, plan.spec.forward.kept, first)
            self.dropout.read(seed)

    def _scores(self, head: Value) -> TransposedScores:
        """Returns the scores of the query head `head` (u32): in straight code alone."""
        s = self.plan.schedule
        return TransposedScores.of_spec(self.kb, self.plan.spec.forward, self.extents, self.extras,
                                    (*self.batch, head), self.first, s.block_n, s.block_m)

    def row_values(self, values: Callable[[], Value], count: int) -> RowValues:
        """Returns the values of the lane's `count` rows from a shared address (u32) on, four of them at a
        time: −log₂e · l, or −scale · delta. They are read at once, before products that read all their
        operands from shared memory, and that these reads would wait for; where registers are few, when
        needed."""
        places: list[Value] = []

        def read(c: int) -> Sequence[Value]:
            if not places: places.append(self._own(values()))
            return self.kb.ld("shared", "f32", places[0].at(64 * c), 4)
        if not self.plan.reads_ahead: return read
        return [read(c) for c in range(count // 4)].__getitem__

    def of(self, s: Sequence[Value], p: Sequence[Value], row: Value, head: Value, logs: RowValues) -> None:
        """Sums of the rows from `row` (s32) on become weights; `logs` are the rows' −log₂e · l. What is
        evaluated is so 16 rows at a time."""
        at_once = 8 if self.evaluated else len(s)
        for first in range(0, len(s), at_once):
            some = slice(first, first + at_once), slice(first // 2, (first + at_once) // 2)
            here = row + 2 * first if first else row
            self._some(s[some[0]], p[some[1]], here, head, logs, first // 8)

    def _some(self, s: Sequence[Value], p: Sequence[Value], row: Value, head: Value, logs: RowValues,
              begin: int) -> None:
        """Computes the weights of the rows from the `begin`th 16 on."""
        kb, scores = self.kb, self._scores(head)
        cells, slopes = scores.score_and_slope([[list(s[i:i + 4]) for i in range(0, len(s), 4)]], row)
        found = list(values_of(cells))
        if (partly := self.blocks.partly(self.blocks.full(), row, 2 * len(s))) is not None:
            with kb.if_(partly): scores.mask(cells, row)
        for c in range(len(s) // 8):
            own = logs(begin + c)
            for i in range(8 * c, 8 * c + 8):
                kb.emit("fma.rn.f32", s[i], found[i], scores.factor, own[2 * (i >> 2 & 1) + (i & 1)])
                kb.emit("ex2.approx.ftz.f32", s[i], s[i])
        if self.dropout is None: self._pack(p, s)
        else:
            _, heads, group = self.plan.spec.forward.batch
            matrix = (self.batch[0] * heads + self.batch[1]) * group + head
            self.dropout.mark([[s[i:i + 4] for i in range(0, len(s), 4)]], row, matrix)
            self._pack(p, [self.dropout.of_values(each) for each in s])
        if slopes is not None: self._times(s, slopes)

    def _times(self, s: Sequence[Value], slopes: AccFragment) -> None:
        """p times the derivative, which may be infinite where p is 0."""
        for value, slope in zip(s, values_of(slopes), strict=True):
            value.set(self.kb.select(value == 0.0, 0.0, value * slope))

    def slopes(self, s: Sequence[Value], dp: Sequence[Value], ds: Sequence[Value],
               changes: RowValues) -> None:
        """ds of weights and dp; `changes` are the rows' −scale · delta."""
        kb, scale = self.kb, scale_of(self.plan)
        for c in range(len(s) // 8):
            own = changes(c)
            for i in range(8 * c, 8 * c + 8):
                change = own[2 * (i >> 2 & 1) + (i & 1)]
                if self.dropout is not None: self.dropout.change(dp[i], s[i], change, scale)
                else:
                    kb.emit("fma.rn.f32", dp[i], dp[i], scale, change)
                    dp[i].__imul__(s[i])
            self._pack(ds[4 * c:4 * c + 4], dp[8 * c:8 * c + 8])

    def _own(self, values: Value) -> Value:
        """The address of the lane's four values of rows 0 … 15."""
        return values + ((self.kb.special("laneid") & 3) << 4)

    def _pack(self, packed: Sequence[Value], wide: Sequence[Value]) -> None:
        for i, each in enumerate(packed):
            self.kb.emit(f"cvt.rn.{self.kind}x2.f32", each, wide[2 * i + 1], wide[2 * i])
