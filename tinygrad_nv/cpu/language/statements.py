"""The operations of a program that are statements in C: along an axis, and stores.

Protocol: `Statements(program, isa, …).run()` emits the whole body; each operation of the IR has a method.
Reductions of a row keep a vector of partial results, whose lanes are combined at the end in one order.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.cpu.expression import constant_text
from tinygrad_nv.cpu.kernel import C_TYPES, c_type
from tinygrad_nv.cpu.language.emitter import c_name
from tinygrad_nv.cpu.language.grouping import keeps_columns
from tinygrad_nv.cpu.language.loops import LoopEmitter
from tinygrad_nv.cpu.language.views import View, vector
from tinygrad_nv.tile.expression import Constant, short
from tinygrad_nv.tile.gemm.spec import FLOAT16S, FP8
from tinygrad_nv.tile.language.ir import Op, TileType, Value
from tinygrad_nv.tile.operations import LANGUAGE_OPERATIONS

LEAST = {dtypes.int32: -2**31, dtypes.int16: -2**15, dtypes.int8: -2**7, dtypes.uint32: 0, dtypes.uint16: 0,
         dtypes.uint8: 0}

TOGETHER = 4    # vectors of a row that are added to sums of their own: an addition takes four cycles
WIDE = (dtypes.float32, dtypes.int32, dtypes.uint32, dtypes.bool)   # whose results need no rounding


def neutral(fn: str, dtype: DType) -> Any:
    """Returns the neutral element of a reduction."""
    if dtype == dtypes.bool: return fn in ("min", "mul", "and")
    if fn in ("add", "or", "xor"): return 0
    if fn == "mul": return 1
    if fn == "and": return -1
    if dtypes.is_float(dtype): return float("-inf") if fn == "max" else float("inf")
    least = LEAST[dtype]
    most = 2**32 - 1 if dtype == dtypes.uint32 else 2**(dtype.itemsize * 8) - 1 if not least else -least - 1
    return least if fn == "max" else most


class Statements(LoopEmitter):
    """Emits every operation."""

    def run(self) -> str:
        """The C of the body."""
        self.region(self.program.body)
        return "\n".join(self.lines)

    def do_constant(self, op: Op) -> None:
        text = constant_text(Constant(op.attributes["value"], op.result.dtype))
        self.forms[op.result] = f"({text})"
        if op.attributes["value"] == 0: self.zeros.add(op.result)

    def do_program_id(self, op: Op) -> None:
        self.forms[op.result] = self.variable(f"(vi)(s32)pid{op.attributes['axis']}", dtypes.int32)

    def do_barrier(self, op: Op) -> None: pass

    def do_transpose(self, op: Op) -> None:
        source, order = op.operands[0], op.attributes["permutation"]
        if keeps_columns(op) and isinstance(self.forms[source], Op): return self.place(op)
        feeds = self.uses[op.result] == 1 and self._feeds_dot(op.result)
        view = (self.direct(source) if feeds else None) or self.view(source)
        self.forms[op.result] = made = view.transpose(order)
        if feeds: return None
        target = self.allocate(op.result.dtype, op.result.shape)
        self.store_to(target, op.result) if made.strides[-1] == 1 else self._copy_elements(target, made)
        self.forms[op.result] = target
        return None

    def do_halves(self, op: Op) -> None:
        words, word = self.view(op.operands[0]), self.name("w")
        self.forms[op.result] = target = self.allocate(op.result.dtype, op.result.shape)
        with self.outer_loops(words.shape) as places:
            self.line(f"u32 {word}; __builtin_memcpy(&{word}, {words.at(places[:-1], places[-1])}, 4);")
            self.line(f"*({target.at(places, '0')}) = (u16){word};")
            self.line(f"*({target.at(places, '1')}) = (u16)({word} >> 16);")

    def _feeds_dot(self, value: Value) -> bool:
        return any(value in op.operands[:2] for op in self.region_now.ops if op.name == "dot")

    # **** along an axis ****

    def do_reduce(self, op: Op) -> None:
        if op.regions: return self._combine(op)
        axis, shape = op.attributes["axis"], op.operands[0].shape
        if not op.result.shape: return self._reduce_row(op, None, [])
        if axis < len(shape) - 1 and self.once(op.result) and op.result not in self.targets:
            self.forms[op.result] = op
            return None
        target = self.targets.get(op.result) or self.allocate(op.result.dtype, op.result.shape)
        if axis == len(shape) - 1:
            with self.outer_loops(shape[:-1]) as outer: self._reduce_row(op, target, outer)
        else: self._reduce_column(op, target)
        self.forms[op.result] = target
        return None

    def _reduce_row(self, op: Op, target: View | None, outer: Sequence[str]) -> None:
        source, fn = op.operands[0], op.attributes["fn"]
        dtype, extent, kind = source.dtype, source.shape[-1], vector(source.dtype)
        start = constant_text(Constant(neutral(fn, dtype), dtype))
        total, whole = self.name("r"), extent // self.lanes * self.lanes
        self.line(f"{kind} {total} = {start};")
        done = self._reduce_together(total, start, op, outer, whole)
        if self.is_limited(source): self._reduce_limited(total, start, op, outer)
        elif done < whole:
            column = self.name("j")
            with self.braces(f"for (s64 {column} = {done}; {column} < {whole}; {column} += W)"):
                self._accumulate(total, fn, dtype, self.vector(source, outer, column))
        if whole < extent:    # never of columns that are limited
            with self.braces(""):
                value = self.vector(source, outer, str(whole))
                choose = "pick" if kind == "vf" else "pick_i"
                self._accumulate(total, fn, dtype, f"{choose}(iota_() < {extent - whole}, {value}, {start})")
        lanes = self._across(total, fn, dtype)
        if target is None: self.forms[op.result] = self.variable(f"({kind}){lanes}", dtype)
        else: self.line(target.write(outer[:-1], outer[-1], f"({kind}){lanes}", "1"))

    def _reduce_together(self, total: str, start: str, op: Op, outer: Sequence[str], whole: int) -> int:
        """Emits several vectors at a time, of long rows: one sum would wait for itself at each. The first
        column that is left."""
        source, fn = op.operands[0], op.attributes["fn"]
        step = TOGETHER * self.lanes
        if (done := whole // step * step) < 2 * step or self.is_limited(source): return 0
        totals, column = [self.name("r") for _ in range(TOGETHER)], self.name("j")
        for each in totals: self.line(f"{vector(source.dtype)} {each} = {start};")
        with self.braces(f"for (s64 {column} = 0; {column} < {done}; {column} += {step})"):
            for i, each in enumerate(totals):
                self._accumulate(each, fn, source.dtype, self.vector(source, outer, f"({column} + {i} * W)"))
        for other in (1, 3): self._accumulate(totals[other - 1], fn, source.dtype, totals[other])
        self._accumulate(totals[0], fn, source.dtype, totals[2])
        self._accumulate(total, fn, source.dtype, totals[0])
        return done

    def _reduce_limited(self, total: str, start: str, op: Op, outer: Sequence[str]) -> None:
        """Emits the columns of a strip, in turn added to two sums."""
        source, fn, other, column = op.operands[0], op.attributes["fn"], self.name("r"), self.name("j")
        self.line(f"{vector(source.dtype)} {other} = {start};")
        self.line(f"s64 {column} = {self.low};")
        with self.braces(f"for (; {column} + W < {self.high}; {column} += 2 * W)"):
            for each, at in ((total, column), (other, f"({column} + W)")):
                self._accumulate(each, fn, source.dtype, self.vector(source, outer, at))
        with self.braces(f"if ({column} < {self.high})"):
            self._accumulate(total, fn, source.dtype, self.vector(source, outer, column))
        self._accumulate(total, fn, source.dtype, other)

    def _accumulate(self, total: str, fn: str, dtype: DType, value: str) -> None:
        text = LANGUAGE_OPERATIONS[fn].c(dtype).format(total, value)
        self.line(f"{total} = {text if dtype in WIDE else f'round_{short(dtype)}({text})'};")

    def _across(self, total: str, fn: str, dtype: DType) -> str:
        """All lanes of a vector together: halves with halves."""
        if fn == "add" and dtypes.is_float(dtype): return f"sum_({total})"
        made, width = self.name("h"), self.lanes
        self.line(f"{vector(dtype)} {made} = {total};")
        while width > 1:
            width //= 2
            order = ", ".join(str((i + width) % self.lanes) for i in range(self.lanes))
            other = f"__builtin_shufflevector({made}, {made}, {order})"
            other = self.variable(other, dtype)
            self._accumulate(made, fn, dtype, other)
        return f"{made}[0]"

    def _reduce_column(self, op: Op, target: View) -> None:
        with self.loops(op.result.shape) as (outer, column):
            self.line(target.write(outer, column, self._lazy_reduce(op, outer, column, False)))

    def _lazy_reduce(self, op: Op, outer: Sequence[str], column: str, uniform: bool) -> str:
        """Along another axis than the last."""
        source, fn, axis = op.operands[0], op.attributes["fn"], op.attributes["axis"]
        dtype, total, index = source.dtype, self.name("r"), self.name("i")
        self.line(f"{vector(dtype)} {total} = {constant_text(Constant(neutral(fn, dtype), dtype))};")
        with self.braces(f"for (s64 {index} = 0; {index} < {source.shape[axis]}; {index}++)"):
            at = [*outer[:axis], index, *outer[axis:]]
            self._accumulate(total, fn, dtype, self.vector(source, at, column, uniform))
        return total

    def do_scan(self, op: Op) -> None:
        targets = [self.allocate(each.dtype, each.shape) for each in op.results]
        self._sequential(op, targets)
        self.forms.update(zip(op.results, targets, strict=True))

    def _combine(self, op: Op) -> None:
        """A reduction with a function of the user's: the last of its partial results."""
        axis = op.attributes["axis"]
        targets = [self.allocate(each.dtype, each.shape) for each in op.operands]
        self._sequential(op, targets)
        for result, target in zip(op.results, targets, strict=True):
            view = View(f"({target.base} + {(target.shape[axis] - 1) * target.strides[axis]})", result.dtype,
                        tuple(e for i, e in enumerate(target.shape) if i != axis),
                        tuple(s for i, s in enumerate(target.strides) if i != axis))
            if result.shape: self.forms[result] = view
            else: self.forms[result] = self.variable(view.read((), "0", True), result.dtype)

    def _sequential(self, op: Op, targets: Sequence[View]) -> None:
        """Partial results one after the other along an axis; along the last one with columns as rows."""
        axis, shape = op.attributes["axis"], op.operands[0].shape
        sources = [self.view(each) for each in op.operands]
        back = op.attributes.get("reverse", False)
        along = axis == len(shape) - 1
        if along and len(shape) > 1: return self._on_transposed(op, targets, sources)
        rest = [extent for i, extent in enumerate(shape) if i != axis] or [1]
        with self.loops(rest) as (outer, column):
            index = self.name("i")
            state = [self.name("state") for _ in sources]
            for name, source in zip(state, sources, strict=True): self.line(f"{vector(source.dtype)} {name};")
            with self.braces(f"for (s64 {index} = 0; {index} < {shape[axis]}; {index}++)"):
                at = f"({shape[axis] - 1} - {index})" if back else index
                places = [at] if along else [*outer[:axis], at, *outer[axis:], column]
                values = [self.variable(each.read(places[:-1], places[-1], along),
                                        each.dtype) for each in sources]
                with self.braces(f"if ({index} == 0)"):
                    for name, value in zip(state, values, strict=True): self.line(f"{name} = {value};")
                with self.braces("else"): self._step(op, state, values)
                for name, target in zip(state, targets, strict=True):
                    self.line(target.write(places[:-1], places[-1], name, "1" if along else ""))
        return None

    def _step(self, op: Op, state: Sequence[str], values: Sequence[str]) -> None:
        if not op.regions: return self._accumulate(state[0], op.attributes["fn"], op.results[0].dtype,
                                                   values[0])
        region, = op.regions
        self.forms.update(zip(region.arguments, (*state, *values), strict=True))
        self.region(region)
        made = [self.variable(self.vector(each, (), "0", True), each.dtype) for each in region.yields]
        for name, value in zip(state, made, strict=True): self.line(f"{name} = {value};")
        return None

    def _on_transposed(self, op: Op, targets: Sequence[View], sources: Sequence[View]) -> None:
        """Emits an operation along the last of several axes: on transposed copies, so that rows lie along the
        vectors."""
        shape = op.operands[0].shape
        rows = 1
        for extent in shape[:-1]: rows *= extent
        turned = (shape[-1], rows)
        flat = []
        for source, target in zip(sources, targets, strict=True):
            seen = source.reshape((rows, shape[-1])) or self._dense(source).reshape((rows, shape[-1]))
            assert seen is not None
            copy = self.allocate(source.dtype, turned)
            self._copy_elements(copy, seen.transpose((1, 0)))
            flat.append((copy, self.allocate(target.dtype, turned), target))
        inner = Op(op.name, tuple(Value(_with_shape(each, turned)) for each in op.operands), op.results,
                   {**op.attributes, "axis": 0}, op.regions)
        for value, (copy, _, _) in zip(inner.operands, flat, strict=True): self.forms[value] = copy
        self._sequential(inner, [made for _, made, _ in flat])
        for _, made, target in flat:
            back = target.reshape((rows, shape[-1]))
            assert back is not None
            self._copy_elements(back, made.transpose((1, 0)))

    def do_gather(self, op: Op) -> None:
        source, index = (self.view(each) for each in op.operands)
        target, axis = self.allocate(op.result.dtype, op.result.shape), op.attributes["axis"]
        with self.outer_loops(op.result.shape) as places:
            at = list(places)
            at[axis] = f"(s64)*({index.at(places[:-1], places[-1])})"
            self.line(f"*({target.at(places[:-1], places[-1])}) = *({source.at(at[:-1], at[-1])});")
        self.forms[op.result] = target

    def do_sort(self, op: Op) -> None:
        source, axis = op.operands[0], op.attributes["axis"]
        target = self.allocate(op.result.dtype, op.result.shape)
        self.store_to(target, source)
        self._sort_function(short(source.dtype), op.attributes["descending"])
        shape = op.result.shape
        with self.outer_loops([extent for i, extent in enumerate(shape) if i != axis]) as outer:
            places = [*outer[:axis], "0", *outer[axis:]]
            name = f"sort_{short(source.dtype)}{'_down' * op.attributes['descending']}"
            self.line(f"{name}({target.at(places[:-1], places[-1])}, {shape[axis]}, {target.strides[axis]});")
        self.forms[op.result] = target

    def do_rank(self, op: Op) -> None:
        source, bins = self.view(op.operands[0]), op.attributes["bins"]
        ranks, counts = (self.allocate(each.dtype, each.shape) for each in op.results)
        with self.outer_loops(counts.shape) as (place,): self.line(f"*({counts.at((), place)}) = 0;")
        with self.outer_loops(ranks.shape) as (place,):
            number, known = f"*({source.at((), place)})", self.name("n")
            rank = f"*({ranks.at((), place)}) = " if self.uses[op.results[0]] else ""
            self.line(f"const u32 {known} = (u32){number};")
            self.line(f"if ({known} < {bins}u) {rank}(*({counts.at((), f'(s64){known}')}))++;")
            if rank: self.line(f"else {rank}0;")
        self.forms.update(zip(op.results, (ranks, counts), strict=True))

    def _sort_function(self, kind: str, down: bool) -> None:
        """Shell's sort with Ciura's gaps, of elements in the format of memory."""
        element, number = C_TYPES[kind], "float" if kind in ("f32", "bf16", "f16", "e4m3", "e5m2") else "s64"
        read = f"({number}){'(u32)' if kind == 'u32' else ''}one_{kind}"
        text = f"""
NOINLINE void sort_{kind}{'_down' * down}({element} *p, s64 n, s64 stride) {{
  static const s64 gaps[] = {{1750, 701, 301, 132, 57, 23, 10, 4, 1}};
  for (int g = 0; g < 9; g++) for (s64 i = gaps[g]; i < n; i++) {{
    const {element} kept = p[i * stride];
    const {number} key = {read}(&kept);
    s64 j = i;
    for (; j >= gaps[g] && {read}(p + (j - gaps[g]) * stride) {'<' if down else '>'} key; j -= gaps[g])
      p[j * stride] = p[(j - gaps[g]) * stride];
    p[j * stride] = kept;
  }}
}}"""
        if text not in self.functions: self.functions.append(text)

    # **** stores ****

    def do_store_block(self, op: Op) -> None:
        if (group := self.groups[op])[-1] is not op: return
        for each in group: self.flag(each)
        tests = {self._list_tests(each) for each in group}
        if len(tests) > 1 or tests == {()}: return self._store_group(group)
        self.given, = tests
        with self.braces(f"if ({' && '.join(self.given)})"): self._store_group(group)
        self.given = ()

    def _list_tests(self, op: Op) -> tuple[str, ...]:
        """Returns the conditions under which the rows of a block are there, where they are one for all of the
        loop; none where there is no loop."""
        *starts, value = op.operands
        sizes, outer = op.attributes["sizes"], ["0"] * (len(value.shape) - 1)
        if not value.shape or any(size and not self.ranges.inside(self.tensor(op), axis, starts, size)
               for axis, size in enumerate(sizes)): return ()
        inside = self.row_pointer(op, starts, outer)[2]
        return () if inside == "1" else tuple(inside.split(" && "))

    def _store_group(self, group: Sequence[Op]) -> None:
        """Writes stores that are one loop."""
        op, shape = group[-1], group[-1].operands[-1].shape
        pairs = any(self.is_interleaved(self._skip_rounding(each.operands[-1])) for each in group)
        with self.loops((*shape[:-1], shape[-1] // 2) if pairs else shape or (1,)) as (outer, column):
            for at in self.each_column(column, shape[-1]) if pairs else (column,):
                for value in self.first.get(op, ()): self.vector(value, outer if shape else [], at, not shape)
                for each in group: self._store_vector(each, outer if shape else [], at)

    def _store_vector(self, op: Op, outer: Sequence[str], column: str) -> None:
        *starts, value = op.operands
        tensor, name, shape = self.tensor(op), short(value.dtype), value.shape
        row, first, inside, last = self.row_pointer(op, starts, outer)
        made = self.vector(self._skip_rounding(value), outer, column, not shape)
        head = "" if inside == "1" else f"if ({inside}) "
        if last < 0 and value.dtype.itemsize == 4: return self.line(f"{head}*({row}) = ({made})[0];")
        if last < 0: return self.line(f"{head}store_n_{name}({row}, {made}, 1);")
        if tensor.strides[last] != 1:
            return self._scatter(op, row, first, inside, last, made, column, shape[-1])
        count = f"{shape[-1]} - ({column}) < W ? {shape[-1]} - ({column}) : W"
        where = f"{row} + {first} + ({column}), {made}"
        inside = self.store_inside(name, where, column, shape[-1])
        if op in self.flags:
            extent = self.extent(tensor, last)
            beside = f"put_window_{name}({row}, {first} + {column}, {extent}, {made}, {count})"
            inside = f"if ({self.flags[op]}) {{ {inside}; }} else {beside}"
        return self.line(f"{head}{{ {inside}; }}")

    def _skip_rounding(self, value: Value) -> Value:
        """Returns what a store of fewer than 32 bits rounds, or cuts, to the value."""
        form = self.forms[value]
        if not isinstance(form, Op) or form.name != "cast" or value.dtype.itemsize > 2: return value
        source, short = form.operands[0], value.dtype in (*FLOAT16S, *FP8)
        wide = dtypes.float32 if short else dtypes.int32
        return source if source.dtype == wide and value.dtype != dtypes.bool else value

    def _scatter(self, op: Op, row: str, first: str, inside: str, last: int, made: str, column: str,
                 size: int) -> None:
        tensor, place = self.tensor(op), f"{first} + ({column}) + l"
        kept = self._elements(made, tensor.dtype)
        self.line(f"if ({inside}) for (s64 l = 0; l < W && l < {size} - ({column}); l++) "
                  f"if ((u64)({place}) < {self.extent(tensor, last)}) "
                  f"({row})[({place}) * {tensor.strides[last]}ll] = {kept}[l];")

    def _elements(self, made: str, dtype: DType) -> str:
        """A vector's elements in the format of memory."""
        name = self.name("e")
        self.line(f"{c_type(dtype)} {name}[W]; store_{short(dtype)}({name}, {made});")
        return name

    def do_store(self, op: Op) -> None:
        tensor, shape = self.tensor(op), op.operands[0].shape
        with self.loops(shape or (1,)) as (outer, column):
            outer = outer if shape else []
            at, made, holds = (self.vector(each, outer, column, not shape) for each in op.operands)
            if shape and self.is_row(op.operands[0], op.operands[2]):
                where = f"p_{c_name(tensor.name)} + {at}[0], {made}"
                inside = self.store_inside(short(tensor.dtype), where, column, shape[-1])
                return self.line(f"if ({holds}[0]) {{ {inside}; }}")
            kept = self._elements(made, tensor.dtype)
            bound = f"{shape[-1]} - ({column})" if shape else "1"
            return self.line(f"for (s64 l = 0; l < W && l < {bound}; l++) if ({holds}[l]) "
                             f"p_{c_name(tensor.name)}[(s64){at}[l]] = {kept}[l];")

    def do_atomic(self, op: Op) -> None:
        tensor, fn, shape = self.tensor(op), op.attributes["fn"], op.result.shape
        target = self.allocate(op.result.dtype, shape or (1,))
        with self.loops(shape or (1,)) as (outer, column):
            outer = outer if shape else []
            at, made, holds = (self.vector(each, outer, column, not shape) for each in op.operands)
            kept, before = self._elements(made, tensor.dtype), self.name("e")
            bound = f"{shape[-1]} - ({column})" if shape else "1"
            place = f"p_{c_name(tensor.name)} + (s64){at}[l]"
            self.line(f"{c_type(tensor.dtype)} {before}[W] = {{0}};")
            self.line(f"for (s64 l = 0; l < W && l < {bound}; l++) if ({holds}[l]) "
                      f"{before}[l] = atomic_{fn}_{short(tensor.dtype)}({place}, {kept}[l]);")
            self.line(target.write(outer, column, f"load_{short(tensor.dtype)}({before})"))
        if shape: self.forms[op.result] = target
        else: self.forms[op.result] = self.variable(f"({vector(tensor.dtype)})*{target.base}", tensor.dtype)


def _with_shape(value: Value, shape: tuple[int, ...]) -> TileType: return TileType(value.dtype, shape)
