"""Sums that a loop adds up, in parts: each thread's own until the loop ends.

Protocol: a loop carries t, and its body ends with t' = t + Σ x, or t' = t f + Σ x, along an axis, where
nothing else looks at t, t' or the sum:

    ahead of the loop       t stays in one thread of those among which the axis lies; the others begin with 0
    in the body             Σ is of a thread's own elements: no shuffles, no shared memory
    behind the loop         the threads' parts are added up, in the order of every reduction

The factor f is the same in all of these threads, so that Σ (t_i f + x_i) = (Σ t_i) f + Σ x_i.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Value as Register
from tinygrad_nv.tile.language.gpu import elements
from tinygrad_nv.tile.language.gpu.collective import Collective
from tinygrad_nv.tile.language.gpu.held import Held
from tinygrad_nv.tile.language.gpu.layout import extents
from tinygrad_nv.tile.language.ir import Op, Value

Registers = Sequence[Sequence[Register] | None]     # of a value, by parts


class PartialSums(Collective):
    """Loops with such sums. `partial`: reductions that are a thread's own."""
    partial: set[Op]

    def sums_of(self, op: Op) -> Mapping[int, Op]:
        """The reduction that each such value of a loop is a sum of, by its place."""
        return {place: found for place, value in enumerate(op.regions[0].yields)
                if (found := self._sum(op, place, value)) is not None}

    def _sum(self, op: Op, place: int, value: Value) -> Op | None:
        region, uses, made = op.regions[0], self.assignment.uses, self.makers
        argument, total = region.arguments[place + 1], made.get(value)
        if total is None or total not in region.ops or not self._is(total, "add") or \
                region.yields.count(value) > 1 or uses[value] != [op]: return None
        for one, other in (total.operands, total.operands[::-1]):
            found = made.get(other)
            if found is None or found.name != "reduce" or found.regions or found not in region.ops: continue
            if found.attributes["fn"] == "add" and uses[other] == [total] and \
                    self._is_carried(one, argument, total) and self._alike(found, argument): return found
        return None

    @staticmethod
    def _is(op: Op, fn: str) -> bool: return op.name == "apply" and op.attributes["fn"] == fn

    def _is_carried(self, value: Value, argument: Value, total: Op) -> bool:
        """Whether a value is the argument, or that times something, and nothing else looks at it."""
        uses, made = self.assignment.uses, self.makers.get(value)
        if value is argument: return uses[argument] == [total]
        return made is not None and self._is(made, "mul") and uses[value] == [total] and \
            uses.get(argument) == [made] and made.operands.count(argument) == 1

    def _alike(self, found: Op, argument: Value) -> bool:
        """Whether the sum is in the layout in which it is carried, of threads among which its axis lies."""
        wide = found.operands[0]
        if not argument.shape or wide in self.assignment.free: return False
        layout = self.assignment.layout(wide)
        bits = extents(wide.shape).of_axis(found.attributes["axis"])
        return argument.dtype in (dtypes.float32, dtypes.int32) and bool(list(layout.thread_bits(bits))) and \
            layout.without(bits) == self.assignment.layout(argument)

    # **** around the loop ****

    def enter_sums(self, op: Op, carried: Sequence[Registers]) -> Mapping[int, Op]:
        """Ahead of a loop, whose carried values are in these registers."""
        found = self.sums_of(op)
        for place, reduction in found.items():
            self.partial.add(reduction)
            if self._zero(op.operands[3 + place]): continue
            wide = reduction.operands[0]
            bits = extents(wide.shape).of_axis(reduction.attributes["axis"])
            over = [at for at, _ in self.assignment.layout(wide).thread_bits(bits)]
            first = self.threads.first(sum(1 << at for at in over))
            assert first is not None
            for registers in carried[place]:
                for one in registers or ():
                    one.set(self.kb.select(first, one, 0.0 if one.kind == "f32" else 0, one.kind))
        return found

    def _zero(self, value: Value) -> bool:
        return all(part is None or elements.constant_number(part) == 0 for part in self.value(value).parts)

    def leave_sums(self, op: Op, found: Mapping[int, Op]) -> None:
        """Behind a loop whose results are what it carried."""
        for place, reduction in found.items():
            self.partial.discard(reduction)
            result = op.results[place]
            held, layout = self.value(result), self.assignment.layout(reduction.operands[0])
            bits = extents(reduction.operands[0].shape).of_axis(reduction.attributes["axis"])
            some = self.across_threads(self.combiner(reduction), layout, self.singles(held), bits, held.dtype)
            whole = self.from_singles(result.dtype, result.shape, held.layout, some)
            self.scopes.put(result, Held(result.dtype, result.shape, held.layout, whole.parts))
