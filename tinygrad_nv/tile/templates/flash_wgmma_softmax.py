"""Softmax of one block after the other, on the fragment of a wgmma (Milakov & Gimelshein 2018).

Protocol: a thread has columns 8j + 2q, 8j + 2q + 1 of its warp's rows g and g + 8 (g = lane / 4,
q = lane % 4), register i being row g + 8 · (i / 2 % 2); four neighbouring lanes share a row. Of each row

    top     the largest score so far, times log2 e · scale
    total   Σ 2^(score − top) of this thread's columns

and `absorb(scores)` makes scores into weights 2^(score − top), and gives what everything summed before is to
be multiplied with: 2^(top before − top). A row that has seen nothing has top = −inf, from which nothing may
be subtracted: 0 stands in for it, and its weights are 2^−inf = 0.

The scale costs nothing: it is a factor of the multiply-add that subtracts the largest score.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.ptx.builder import Kernel, Value

LN_2 = 0.6931471805599453


class Softmax:
    """The running softmax of a thread's two rows."""

    def __init__(self, k: Kernel, scale: float) -> None:
        """`scale`: positive, what scores are multiplied with for base 2."""
        self.k, self.scale = k, scale
        self.top = k.regs("f32", 2, -float("inf"))
        self.total = k.regs("f32", 2, 0.0)

    def absorb(self, scores: Sequence[Value]) -> list[Value]:
        """Scores become weights; the factors of what was before, one for each row."""
        return [self._row(row, [each for i, each in enumerate(scores) if i >> 1 & 1 == row])
                for row in range(2)]

    def _row(self, row: int, scores: list[Value]) -> Value:
        k, top = self.k, self.top[row]
        most = self._over_quad("max", self._reduced("max", scores))
        if self.scale != 1.0: most *= self.scale
        k.emit("max.f32", most, most, top)
        safe = k.select(most == -float("inf"), 0.0, most)
        factor = self._exp2(top - safe)
        top.set(most)
        below = -safe
        for each in scores:
            k.emit("fma.rn.f32", each, each, self.scale, below)
            k.emit("ex2.approx.ftz.f32", each, each)
        more = self._reduced("add", scores)
        k.emit("fma.rn.f32", self.total[row], self.total[row], factor, more)
        return factor

    def _exp2(self, value: Value) -> Value:
        made = self.k.reg("f32")
        self.k.emit("ex2.approx.ftz.f32", made, value)
        return made

    def _reduced(self, op: str, values: Sequence[Value]) -> Value:
        """All values by an operation, in four chains."""
        chains = [values[i::4] for i in range(4)]
        made = [self._chain(op, chain) for chain in chains if chain]
        return self._chain(op, made)

    def _chain(self, op: str, values: Sequence[Value]) -> Value:
        made = values[0]
        for each in values[1:]:
            joined = self.k.reg("f32")
            self.k.emit(f"{op}.f32", joined, made, each)
            made = joined
        return made

    def _over_quad(self, op: str, value: Value) -> Value:
        """Over the lanes that share a row."""
        made = value
        for distance in (1, 2):
            other, joined = self.k.regs("f32", 2)
            self.k.emit("shfl.sync.bfly.b32", other, made, distance, 31, -1)
            self.k.emit(f"{op}.f32", joined, made, other)
            made = joined
        return made

    def finish(self) -> tuple[list[Value], list[Value]]:
        """For each row: 1 / total, 0 where nothing was seen; and its l."""
        k, inverse, logs = self.k, [], []
        for row in range(2):
            total = self._over_quad("add", self.total[row])
            short, log = k.regs("f32", 2)
            k.emit("rcp.approx.ftz.f32", short, total)
            inverse.append(k.select(total == 0.0, 0.0, short))
            k.emit("lg2.approx.ftz.f32", log, total)
            logs.append((log + self.top[row]) * LN_2)
        return inverse, logs
