"""Loops and branches of a program in C, and what they carry.

Protocol: a value that a loop carries has a variable, or an array, which an iteration writes over: in place
where nothing else reads what was there (`_in_place`), else once all that it leaves has been computed.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.cpu.kernel import c_type
from tinygrad_nv.cpu.language.dot import DotEmitter
from tinygrad_nv.cpu.language.emitter import c_name
from tinygrad_nv.cpu.language.grouping import LAZY
from tinygrad_nv.cpu.language.hidden import COLUMN, ROW, Index, find_ends, find_hidden
from tinygrad_nv.cpu.language.strips import Strips, find_stores, find_strips
from tinygrad_nv.cpu.language.text import Outside
from tinygrad_nv.cpu.language.views import View, vector
from tinygrad_nv.tile.language.ir import Op, Region, Value, select_numbers
from tinygrad_nv.tile.language.unmasked import constant_of

TOGETHER = ("apply", "cast", "bitcast", "where_needed", "load_block")    # operations on elements


class LoopEmitter(DotEmitter):
    """Emits regions, and what has them."""

    def region(self, region: Region) -> None:
        """All operations of a region."""
        before = self.region_now, self.groups
        self.region_now, self.groups = region, self.grouped[region]
        self._write(region.ops)
        self._note_places(region)
        self.region_now, self.groups = before

    def _write(self, ops: Sequence[Op]) -> None:
        for op in ops:
            striped = self.strip and any(each in self.strip.values for each in op.results)
            with self.in_strip(self.strip if striped else None):
                if op.name in LAZY: self.place(op)
                else: getattr(self, f"do_{op.name}")(op)

    def _note_places(self, region: Region) -> None:
        made = (*region.arguments, *(each for op in region.ops for each in op.results))
        self.places.update((each, self.forms[each]) for each in made)

    def do_for(self, op: Op) -> None:
        start, stop, step, *initial = op.operands
        region, = op.regions
        index, carried = region.arguments[0], region.arguments[1:]
        names = self._enter(initial, carried)
        bounds = [self.scalar(each) for each in (start, stop, step)]
        i, at, before = self.name("i"), len(self.lines), self.outside
        made = {*region.arguments, *(each for inner in region.walk() for each in inner.results),
                *(each for inner in region.walk() for own in inner.regions for each in own.arguments)}
        self.outside = Outside([], made, self.written_inside)
        if not op.attributes.get("unroll", True): self.line('_Pragma("clang loop unroll(disable)")')
        with self.braces(f"for (s32 {i} = {bounds[0]}; {i} < {bounds[1]}; {i} += {bounds[2]})"):
            self.forms[index] = self.variable(f"(vi){i}", dtypes.int32)
            self._body(op, region, carried)
        self.lines[at:at], self.outside = self.outside.lines, before
        self.forms.update(zip(op.results, names, strict=True))

    def _body(self, op: Op, region: Region, carried: Sequence[Value]) -> None:
        """Emits an iteration."""
        before = self.loop_now, self.together, self.strips
        self.strips = find_strips(op, self.isa) if op.name == "for" else None
        self.loop_now, self.together = op, [] if self.strips else self._find_together(region)
        self._in_place(region, carried)
        pairs = list(zip(carried, region.yields, strict=True))
        if self.strips: self._write_strips(op, self.strips)
        else: self.region(region)
        self._leave([each for each in pairs if not self.strips or each[0] not in self.strips.values])
        self.loop_now, self.together, self.strips = before

    def _write_strips(self, op: Op, strips: Strips) -> None:
        """Emits an iteration strip by strip, and what it leaves of their rows."""
        region, before = op.regions[0], (self.region_now, self.groups)
        self.region_now, self.groups = region, self.grouped[region]
        self._write([op for op in region.ops if op not in strips.ops])
        self.packed = {op: self.pack(op) for op in strips.ops if op.name == "dot"}
        row, last = self.name("i"), self._end_rows(op, strips)
        with self.braces(f"for (s64 {row} = 0; {row} < {last}; {row} += {strips.count})"), \
                self.in_strip(replace(strips, row=row)):
            self._limit_columns(region, strips)
            self._write(strips.ops)
            self.hidden = None
            self._leave([each for each in zip(region.arguments[1:], region.yields, strict=True)
                         if each[0] in strips.values])
            self._note_places(region)
        self.region_now, self.groups = before

    def _end_rows(self, op: Op, strips: Strips) -> str:
        """Returns the row, in C, from which on nothing of what a loop makes is stored."""
        rows, stores = strips.rows, find_stores(op, strips, self.users)
        ends = [self._end_mask(store, rows) if store.name == "store" else self._end_block(store, axis, rows)
                for store, axis in stores]
        if not ends or not all(ends): return str(rows)
        end = self.name("end")
        self.line(f"s64 {end} = 0;")
        for each in ends: self.line(f"{end} = larger({end}, smaller({rows}, {each}));")
        return end

    def _end_block(self, store: Op, axis: int, rows: int) -> str:
        """Returns the row, in C, that is beyond a tensor's last; empty where none is, or that is not known
        yet."""
        tensor, start = self.tensor(store), store.operands[axis]
        first = constant_of(start, self.makers)
        if first is None and start in self.forms: first = f"(s64){self.scalar(start)}"
        inside = self.ranges.inside(tensor, axis, store.operands[:-1], rows)
        return "" if first is None or inside else f"{self.extent(tensor, axis)} - {first}"

    def _end_mask(self, store: Op, rows: int) -> str:
        """Returns the row, in C, from which on a mask does not hold; empty where that is not known yet."""
        end = ""
        for each in find_ends(store.operands[2], self.makers):
            if not self.forms.keys() >= {*each.left.scalars, *each.right.scalars}: continue
            left, right = self._add(each.left), self._add(each.right)
            # where an index wraps around, rows beyond may be stored
            exact = f"{left} + {rows - 1} <= 0x7fffffff && {right} >= -0x7fffffff - 1"
            own = f"({exact} ? {right} - {left} + {each.more} : {rows})"
            end = f"smaller({end}, {own})" if end else own
        return end

    def _limit_columns(self, region: Region, strips: Strips) -> None:
        """Emits the columns that some row of a strip sees; a strip without any is done."""
        if (found := find_hidden(region, strips, self.makers, self.lanes)) is None: return
        assert self.strip is not None
        size, row, end = next(iter(found.values)).shape[1], self.strip.row, self.strip.end
        self.low, self.high = self.name("low"), self.name("high")
        self.line(f"s64 {self.low} = 0, {self.high} = {size};")
        for each in found.bounds:
            left, right = (each.left, each.right)
            # what wraps around below the other side, or above, may be visible
            exact = f"{self._add(left, f'{end} - 1', size - 1)} <= 0x7fffffff && " \
                    f"{self._add(right, row, 0)} >= -0x7fffffff - 1"
            if each.is_end:
                bound = f"{self._add(right, f'{end} - 1')} - {self._add(left)} + {each.more}"
                self.line(f"if ({exact}) {self.high} = smaller({self.high}, {bound});")
            else:
                bound = f"{self._add(left, row)} - {self._add(right)} + {1 - each.more}"
                self.line(f"if ({exact}) {self.low} = larger({self.low}, {bound});")
        self.line(f"if ({self.low} >= {self.high}) continue;")
        self.line(f"{self.low} = {self.low} / W * W;")
        self.hidden = found

    def _add(self, index: Index, row: str = "0", column: int = 0) -> str:
        """A sum of indices as a C number of 64 bits."""
        places = [row] * index.axes[ROW] + [str(column)] * index.axes[COLUMN]
        terms = [str(index.number), *(f"(s64){self.scalar(each)}" for each in index.scalars), *places]
        return f"({' + '.join(terms)})"

    def _find_together(self, region: Region) -> list[Value]:
        """Returns values of one shape that an iteration leaves, computed element by element: the largest of
        several."""
        made = [op.result for op in region.ops if op.name in TOGETHER and op.result.shape
                and op.attributes.get("tensor") not in self.written and region.yields.count(op.result) == 1]
        shape = max((each.shape for each in made), key=math.prod, default=())
        made = [each for each in made if each.shape == shape]
        return made if len(made) > 1 else []

    def do_while(self, op: Op) -> None:
        test, region = op.regions
        names = self._enter(op.operands, region.arguments)
        self.forms.update(zip(test.arguments, names, strict=True))
        with self.braces("for (;;)"):
            self.region(test)
            self.line(f"if (!{self.scalar(test.yields[0])}) break;")
            self._body(op, region, region.arguments)
        self.forms.update(zip(op.results, names, strict=True))

    def do_if(self, op: Op) -> None:
        names: list[Any] = [self._find_kept(op, i) or self.allocate(each.dtype, each.shape) if each.shape
                            else self._mutable(each.dtype) for i, each in enumerate(op.results)]
        for head, region in zip((f"if ({self.scalar(op.operands[0])})", "else"), op.regions, strict=True):
            with self.braces(head):
                self.region(region)
                for name, value in zip(names, region.yields, strict=True): self._assign(name, value)
        self.forms.update(zip(op.results, names, strict=True))

    def _find_kept(self, op: Op, number: int) -> View | None:
        """Returns the array of a value that a branch gives as it is, where nothing else reads it and the
        other branch makes each element of those at its place: that writes it in place."""
        yields = [region.yields[number] for region in op.regions]
        for value, other, region in zip(yields, yields[::-1], op.regions[::-1], strict=True):
            maker, form = self.makers.get(value), self.forms.get(value)
            if maker is None or maker not in self.region_now.ops or not isinstance(form, View): continue
            if maker.name not in ("dot", "if") or value in self.targets or value is other: continue
            own = next((each for each in region.ops if other in each.results), None)
            if own is None or own.name != "apply" or own.attributes["fn"] != "where": continue
            if set(self.users[value]) == {op, own} and self.uses[value] == 2: return form
        return None

    def do_select(self, op: Op) -> None:
        """Emits a table for each list."""
        at, count = self.name("at"), len(op.attributes["lengths"])
        index, names = self.scalar(op.operands[0]), op.attributes["choices"]
        self.line(f"const s64 {at} = {index} < 0 ? 0 : {index} < {count} ? {index} : {count - 1};")
        for name, handle in zip(names, op.results, strict=False):
            tensor = self.program.tensor(name)
            kind = f"{'' if tensor.output else 'const '}{c_type(tensor.dtype)} *const"
            table = ", ".join(f"p_{c_name(each)}" for each in tensor.among)
            self.line(f"{kind} p_{name} = (({kind}[]){{{table}}})[{at}];")
            self.forms[handle] = "((vi)0)"
        for value in op.results[len(names):]:
            table, number = ", ".join(map(str, select_numbers(op, value))), self.name("n")
            self.line(f"static const s32 {number}[] = {{{table}}};")
            self.forms[value] = self.variable(f"(vi){number}[{at}]", dtypes.int32)
        length = self.scalar(op.results[len(names)])
        for name in names: self.line(f"const s64 n_{name} = {length};")

    def _mutable(self, dtype: DType) -> str:
        name = self.name("c")
        self.line(f"{vector(dtype)} {name};")
        return name

    def _assign(self, name: Any, value: Value) -> None:
        if isinstance(name, View): self.store_to(name, value)
        else: self.line(f"{name} = {self.vector(value, (), '0', True)};")

    def _enter(self, initial: Sequence[Value], carried: Sequence[Value]) -> list[Any]:
        """Variables and arrays with what a loop begins with."""
        names: list[Any] = []
        for value in initial:
            name = self.allocate(value.dtype, value.shape) if value.shape else self._mutable(value.dtype)
            self._assign(name, value)
            names.append(name)
        self.forms.update(zip(carried, names, strict=True))
        return names

    def _leave(self, pairs: Sequence[tuple[Value, Value]]) -> None:
        """Writes what an iteration leaves to the places of what it was given."""
        places = [self.forms[each] for each, _ in pairs]
        moved = [(place, value) for place, (_, value) in zip(places, pairs, strict=True)
                 if self.forms[value] is not place]
        others = any(self._reads_others(value) for _, value in moved)
        joined = [(place, value) for place, value in moved if not others and value in self.together
                  and isinstance(place, View) and isinstance(self.forms[value], Op)]
        bases = {place.base for place in places if isinstance(place, View)}
        if others or len(moved) > 1:
            moved = [(place, self._keep_value(value, bases)) for place, value in moved
                     if (place, value) not in joined]
        if joined: self.write_together(joined)
        for place, value in moved: self._assign(place, value)

    def _reads_others(self, value: Value) -> bool:
        """Whether an element of a value that is computed where it is used is made of others than those at its
        place: these may be written already."""
        left, seen = [value], set[Value]()
        while left:
            if (one := left.pop()) in seen: continue
            seen.add(one)
            form = self.forms[one]
            if not isinstance(form, Op): continue
            if form.name in ("reduce", "transpose"): return True
            left += [*form.operands, *(each for region in form.regions for each in region.yields)]
        return False

    def _keep_value(self, value: Value, bases: set[str]) -> Value:
        """A value that does not change when what a loop carries is assigned."""
        form, made = self.forms[value], Value(value.type)
        if not value.shape: self.forms[made] = self.variable(self.vector(value, (), "0", True), value.dtype)
        elif isinstance(form, Op) or form.base in bases:  # type: ignore[union-attr]
            if value in self.targets:      # its place is read by nothing else, but it reads others' places
                self.view(value)
                return value
            self.forms[made] = self.allocate(value.dtype, value.shape)
            self.store_to(self.forms[made], value)  # type: ignore[arg-type]
        else: return value
        return made

    def _in_place(self, region: Region, carried: Sequence[Value]) -> None:
        """Finds the yields that may be written over what they replace."""
        for argument, value in zip(carried, region.yields, strict=True):
            place = self.forms[argument]
            maker = next((op for op in region.ops if value in op.results), None)
            if not isinstance(place, View) or maker is None or self.uses[value] != 1: continue
            if maker.name == "dot" and argument not in maker.operands[:2]:
                good = self._only_reader(region, argument, maker.operands[2], maker)
            else: good = maker.name == "apply" and self._only_reader(region, argument, value, maker)
            if good: self.targets[value] = place

    def _only_reader(self, region: Region, argument: Value, tree: Value, maker: Op) -> bool:
        """Whether only an element operation, or the tree of those that it is the root of, reads an
        argument."""
        makers = {result: op for op in region.ops for result in op.results}
        inside: set[Op] = {maker}
        left = [tree]
        while left:
            op = makers.get(left.pop())
            if op is None or op.name not in ("apply", "cast") or op.result.shape != argument.shape: continue
            if op is not maker and self.uses[op.result] != 1: continue
            inside.add(op)
            left += op.operands
        readers = [op for op in region.walk() if argument in op.operands]
        return all(op in inside for op in readers) and argument not in region.yields
