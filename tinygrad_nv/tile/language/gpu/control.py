"""Loops and branches.

Protocol: what a loop carries has registers of its own, in the layout of its class: it enters in them, and is
moved there at the end of each iteration. Bounds and conditions are the same in all threads. Loops whose
operands for dots are copied ahead are those of pipelines.py.

Sums that a loop adds up, in parts: each thread's own until the loop ends.

Protocol: a loop carries t, and its body ends with t' = t + Σ x, or t' = t f + Σ x, along an axis, where
nothing else looks at t, t' or the sum:

    ahead of the loop       t stays in one thread of those among which the axis lies; the others begin with 0
    in the body             Σ is of a thread's own elements: no shuffles, no shared memory
    behind the loop         the threads' parts are added up, in the order of every reduction

The factor f is the same in all of these threads, so that Σ (t_i f + x_i) = (Σ t_i) f + Σ x_i.
"""
from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Value as Register
from tinygrad_nv.tile.lanes import FLOAT16S, Lanes, kind_of
from tinygrad_nv.tile.language.gpu import elements
from tinygrad_nv.tile.language.gpu.arena import Access
from tinygrad_nv.tile.language.gpu.collective import Collective
from tinygrad_nv.tile.language.gpu.held import Held, Part, copy_held, from_registers, map_parts
from tinygrad_nv.tile.language.gpu.layout import Layout, absent, extents
from tinygrad_nv.tile.language.gpu.values import Values
from tinygrad_nv.tile.language.ir import Op, Region, TensorParameter, Value, select_numbers

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
            some = self.across_threads(self.combiner(reduction), layout, self.singles(held), bits, held.dtype,
                                       "add")
            whole = self.from_singles(result.dtype, result.shape, held.layout, some)
            self.scopes.put(result, Held(result.dtype, result.shape, held.layout, whole.parts))


class Carried:
    """Registers of values that a loop carries or a branch makes."""

    def __init__(self, writer: Values, values: Sequence[Value]) -> None:
        self.writer, self.kb, self.values = writer, writer.kb, values
        self.layouts = [writer.assignment.layout(each) for each in values]
        self.registers = [self._registers(value, number) for number, value in enumerate(values)]

    def _registers(self, value: Value, number: int) -> list[list[Register] | None]:
        layout = self.layouts[number]
        width = 1 if layout.count == 1 else 2
        gone = absent(layout, value.shape) if value.shape else (False,)
        packed = value.dtype in FLOAT16S and width == 2
        kind, count = ("b32", 1) if packed else (kind_of(value.dtype), width)
        return [None if all(gone[at:at + width]) else self.kb.regs(kind, count)
                for at in range(0, layout.count, width)]

    def put(self, given: Sequence[Value], last: bool = False) -> None:
        """Moves values to the registers."""
        moves: list[tuple[Register, Register | int | float]] = []
        for value, registers, layout in zip(given, self.registers, self.layouts, strict=True):
            held = self.writer.value(value, layout)
            for part, to in zip(held.parts, registers, strict=True):
                if to is None or part is None: continue
                moves += list(zip(to, self._sources(part, held.width, len(to)), strict=True))
        own = {to.name for to, _ in moves}
        kept = [(to, self._copy_register(source, to) if isinstance(source, Register) and source.name in own
                 and
                 source.name != to.name else source) for to, source in moves]
        for target, source in kept:
            if not isinstance(source, Register) or source.name != target.name: target.set(source)

    def _sources(self, part: Lanes, width: int, count: int) -> list[Register | int | float]:
        if part.dtype in FLOAT16S and width == 2: return [part.pair()]
        return [part.at(i) for i in range(count)]

    def _copy_register(self, source: Register, to: Register) -> Register:
        """A copy of what another move overwrites."""
        return self.kb.reg(to.kind, source)

    def sums(self, position: int) -> dict[int, Register]:
        """The registers of a value, by those of its layout: of 32 bits an element."""
        width = 1 if self.layouts[position].count == 1 else 2
        return {number * width + i: one for number, each in enumerate(self.registers[position])
                if each is not None for i, one in enumerate(each)}

    def bind(self, values: Sequence[Value]) -> None:
        """Gives the registers to values of this scope."""
        for value, registers, layout in zip(values, self.registers, self.layouts, strict=True):
            width = 1 if layout.count == 1 else 2
            parts: list[Part] = [None if each is None else from_registers(self.kb, value.dtype, each, width)
                                 for each in registers]
            self.writer.scopes.put(value, Held(value.dtype, value.shape, layout, parts))


class Control(PartialSums):
    """Loops and branches."""

    def do_for(self, op: Op) -> None:
        region = op.regions[0]
        start, stop, step = (self.number(each) for each in op.operands[:3])
        index, *arguments = region.arguments
        carried, sums = self.enter_loop(op)
        mark = self.arena.mark()
        with self.kb.loop(start, stop, step, kind="s32") as i:
            if not op.attributes.get("unroll", True): self.kb.nounroll()
            self._body(region, carried, arguments, (index, i))
            self.arena.close(mark)
        self.arena.leave(mark)
        self.leave_loop(op, carried, sums)

    def enter_loop(self, op: Op) -> tuple[Carried, Mapping[int, Op]]:
        """Registers of what a loop carries, as it enters; the sums that it adds up in parts."""
        carried = Carried(self, op.regions[0].arguments[1:])
        carried.put(op.operands[3:])
        return carried, self.enter_sums(op, carried.registers)

    def leave_loop(self, op: Op, carried: Carried, sums: Mapping[int, Op]) -> None:
        """Binds the results of a loop, behind it."""
        carried.bind(op.results)
        self.leave_sums(op, sums)

    def _body(self, region: Region, carried: Carried, arguments: Sequence[Value],
              index: tuple[Value, Register] | None = None) -> None:
        self.scopes.push()
        if index is not None: self.put_scalar(index[0], Lanes(self.kb, dtypes.int32, [index[1]]))
        carried.bind(arguments)
        self.region(region)
        carried.put(region.yields)
        self.scopes.pop()

    def do_while(self, op: Op) -> None:
        test, body = op.regions
        carried = Carried(self, body.arguments)
        carried.put(op.operands)
        read: list[Access] = []     # by the condition, behind which the loop ends

        def condition() -> Register:
            self.scopes.push()
            carried.bind(test.arguments)
            self.region(test)
            made = self.scalar(test.yields[0]).register()
            self.scopes.pop()
            read.extend(self.arena.pending)
            return made
        mark = self.arena.mark()
        with self.kb.while_(condition):
            self._body(body, carried, body.arguments)
            self.arena.close(mark)
        self.arena.leave(replace(mark, pending=[*mark.pending, *read]))
        carried.bind(op.results)

    def do_if(self, op: Op) -> None:
        test = self.scalar(op.operands[0]).register()
        carried = Carried(self, op.results)
        with self.arena.branches() as branches:
            with self.kb.if_(test), branches.side(): self._side(op.regions[0], carried)
            with self.kb.else_(), branches.side(): self._side(op.regions[1], carried)
        carried.bind(op.results)

    # **** choices ****

    def do_select(self, op: Op) -> None:
        """Emits a tree of comparisons whose leaves read pointers: one of many is never in a register."""
        kb, place = self.kb, self.scalar(op.operands[0]).register()
        names, count = op.attributes["choices"], len(op.attributes["lengths"])
        bases = {name: kb.reg("u64") for name in names}
        numbers = {each: kb.reg("s32") for each in op.results[len(names):]}

        def leaf(at: int) -> None:
            for name, base in bases.items(): self._set_pointer(base, self.program.tensor(name), at)
            for each, made in numbers.items(): made.set(select_numbers(op, each)[at])

        def among(low: int, high: int) -> None:
            if high - low == 1: return leaf(low)
            middle = (low + high) // 2
            with kb.if_(place < middle): among(low, middle)
            with kb.else_(): among(middle, high)
            return None
        among(0, count)
        for name, handle in zip(names, op.results, strict=False):
            self.pointers[name], self.extents[name] = bases[name], numbers[op.results[len(names)]]
            self.put_scalar(handle, Lanes(kb, dtypes.int32, [0]))
        for each, made in numbers.items(): self.put_scalar(each, Lanes(kb, dtypes.int32, [made]))

    def _set_pointer(self, base: Register, choice: TensorParameter, at: int) -> None:
        """Reads the address of the first element of the tensor at a place."""
        kb, tensor = self.kb, self.program.tensor(choice.among[at])
        if tensor.name in self.labels:
            kb.emit("ld.param.u64", base, self.labels[tensor.name])
            kb.emit("cvta.to.global.u64", base, base)
            if tensor.offset: kb.emit("add.s64", base, base, tensor.offset * tensor.dtype.itemsize)
        else: base.set(self.pointers[tensor.name])

    def do_where_needed(self, op: Op) -> None:
        """A branch of each thread; none where the computation needs other threads' elements."""
        layout, (region,), (result,) = self.assignment.layout(op.result), op.regions, op.results
        test, other = (self.value(each, layout) for each in op.operands)
        some = [part.register(i) for part in {id(each): each for each in test.parts}.values()
                if part is not None for i in range(len(part.each()))]
        carried = Carried(self, [result])
        carried.put([op.operands[1]])
        branch = self.kb.if_(functools.reduce(operator.or_, some)) if self._stays(region, layout) else \
            contextlib.nullcontext()
        with branch:
            self.scopes.push()
            self.region(region)
            # copies: what the branch converts of these the threads outside of it do not have
            parts = [each.parts for each in (copy_held(test), self.value(region.yields[0], layout),
                                             copy_held(other))]
            chosen = map_parts(lambda *each: elements.apply_row(self.kb, "where", each), *parts)
            self.scopes.put(result, Held(result.dtype, result.shape, layout, chosen))
            carried.put([result])
            self.scopes.pop()
        carried.bind([result])

    def _stays(self, region: Region, layout: Layout) -> bool:
        """Whether a thread computes elements from its own."""
        own = self.assignment
        values = {each for op in region.ops for each in (*op.operands, *op.results)} | {*region.yields}
        return all(not each.shape or each in own.free or own.layout(each) == layout for each in values)

    def _side(self, region: Region, carried: Carried) -> None:
        self.scopes.push()
        self.region(region)
        carried.put(region.yields)
        self.scopes.pop()
