"""The body of a program in C: a function of the program's place in the grid.

Protocol. A value has one of three forms: a C variable that holds a scalar in all lanes (`str`), a `View` of
elements in memory, or an operation that is computed where it is used (`Op`). The last is the form of element
operations, conversions and loads that have one use in the region they are in, or uses in one loop of stores,
of reductions and transposes that keep vectors, and of what costs next to nothing. Others are written to an
array, a loop over whole vectors of the last axis. `vector(value, outer, column)` emits what is needed to have
a vector of a value at outer indices and from a column on. Stores of blocks of one shape that nothing lies
between are one loop (`groups`).

What a loop carries lies in an array that the body writes at its end; where an element operation or a dot is
the only reader of what it replaces, it is written in place.
"""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.cpu.expression import cast_text, constant_text
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.language.grouping import Groups, is_in_place, keeps_columns
from tinygrad_nv.cpu.language.text import Form, Text
from tinygrad_nv.cpu.language.views import View, vector
from tinygrad_nv.tile.expression import Constant, short
from tinygrad_nv.tile.language.bounds import Facts
from tinygrad_nv.tile.language.ir import STORES, Op, Program, Region, TensorParameter, Value
from tinygrad_nv.tile.language.ranges import Ranges, uses
from tinygrad_nv.tile.operations import LANGUAGE_OPERATIONS

COUNT = "m"          # the kernel's last integer, where rows are symbolic
CHEAP_NODES = 6      # of an element operation that is computed at each of its uses
REPEATED_NODES = 2   # of one that is repeated along at least so many rows
MANY_ROWS = 16


class Emitter(Text):
    """Writes the C of a program. `functions` are those that the text calls."""

    def __init__(self, program: Program, isa: ISA, ranges: Ranges, grouped: Groups) -> None:
        super().__init__(isa.lanes, any(op.name == "dot" for op in program.body.walk()))
        self.program, self.isa = program, isa
        self.functions: list[str] = []
        self.uses: Counter[Value] = Counter()
        self.home: dict[Value, Region] = {}       # the region of a value's use, where there is one use
        self.targets: dict[Value, View] = {}      # arrays that values are written to, where that is known
        self.written = {op.attributes["tensor"] for op in program.body.walk() if op.name in STORES}
        self.region_now = program.body
        self.facts, self.ranges, self.users = Facts(program), ranges, uses(program.body)
        self.flags: dict[Op, str] = {}
        self.given: tuple[str, ...] = ()          # conditions that hold where lines are written
        self.first: dict[Op, list[Value]] = {}   # values that the loop that ends with a store reads first
        self.grouped, self.groups = grouped, grouped[program.body]  # of the region that is written
        self.loop_now: Op | None = None           # the innermost loop, and what it carries that is one loop
        self.together: list[Value] = []
        self.places: dict[Value, Form] = {}       # of values, when their region has been written
        self.zeros: set[Value] = set()            # constants that are 0
        self.makers = {each: op for op in program.body.walk() for each in op.results}
        self._count(program.body)

    def _count(self, region: Region) -> None:
        for op in region.ops:
            for each in op.operands:
                self.uses[each] += 1
                self.home[each] = region
            for inner in op.regions: self._count(inner)
        for each in region.yields:
            self.uses[each] += 1
            self.home[each] = region

    # **** vectors of values ****

    def vector(self, value: Value, outer: Sequence[str], column: str, uniform: bool = False) -> str:
        """A vector of a value: C that may be used until the innermost braces end."""
        form = self.forms[value]
        if isinstance(form, str): return form
        key = (value, tuple(outer), column, uniform)
        if key not in self.memo:
            text = form.read(outer, column, uniform) if isinstance(form, View) else \
                getattr(self, f"_lazy_{form.name}")(form, outer, column, uniform)
            self.memo[key] = self.variable(text, value.dtype)
        return self.memo[key]

    def scalar(self, value: Value) -> str:
        """A scalar as a C number."""
        return f"({self.vector(value, (), '0', True)})[0]"

    def _lazy_apply(self, op: Op, outer: Sequence[str], column: str, uniform: bool) -> str:
        return self.apply(op, [self.vector(each, outer, column, uniform) for each in op.operands])

    def apply(self, op: Op, args: Sequence[str]) -> str:
        """Returns C of an element operation."""
        row, source, to = LANGUAGE_OPERATIONS[op.attributes["fn"]], op.operands[-1].dtype, op.results[0].dtype
        text = row.c(source).format(*args)
        exact = row.exact or row.compares or source == dtypes.bool or to == dtypes.float32
        return text if exact else f"round_{short(to)}({text})"

    def _lazy_cast(self, op: Op, outer: Sequence[str], column: str, uniform: bool) -> str:
        source = op.operands[0]
        return cast_text(self.vector(source, outer, column, uniform), source.dtype, op.result.dtype)

    def _lazy_bitcast(self, op: Op, outer: Sequence[str], column: str, uniform: bool) -> str:
        return f"({vector(op.result.dtype)}){self.vector(op.operands[0], outer, column, uniform)}"

    def _lazy_iota(self, op: Op, outer: Sequence[str], column: str, uniform: bool) -> str:
        return f"(vi)(s32)({column})" if uniform else f"iota_() + (s32)({column})"

    def _lazy_broadcast(self, op: Op, outer: Sequence[str], column: str, uniform: bool) -> str:
        source, shape = op.operands[0], op.result.shape
        if not source.shape: return self.vector(source, (), "0", True)
        inner = outer[len(shape) - len(source.shape):]
        at = ["0" if extent == 1 else index for extent, index in zip(source.shape[:-1], inner, strict=True)]
        if source.shape[-1] == 1 and shape[-1] > 1: return self.vector(source, at, "0", True)
        return self.vector(source, at, column, uniform)

    def _lazy_reshape(self, op: Op, outer: Sequence[str], column: str, uniform: bool) -> str:
        """Axes of extent 1 are put in or left out; `materialised` has seen to others."""
        source, shape = op.operands[0], op.result.shape
        if not shape: return self.vector(source, ["0"] * (len(source.shape) - 1), "0", True)
        places = [*outer, column]
        kept = [place for place, extent in zip(places, shape, strict=True) if extent > 1]
        at = [kept.pop(0) if extent > 1 else "0" for extent in source.shape]
        along = bool(source.shape) and source.shape[-1] > 1 and shape[-1] > 1
        if not source.shape: return self.vector(source, (), "0", True)
        return self.vector(source, at[:-1], at[-1], uniform or not along)

    def _lazy_transpose(self, op: Op, outer: Sequence[str], column: str, uniform: bool) -> str:
        """The last axis stays: others do not share vectors."""
        order, at = op.attributes["permutation"], [""] * len(outer)
        for axis, place in zip(order, outer, strict=False): at[axis] = place
        return self.vector(op.operands[0], at, column, uniform)

    # **** memory ****

    def row_pointer(self, op: Op, starts: Sequence[Value], outer: Sequence[str]) -> tuple[str, str, str, int]:
        """Returns C of a block's row: a pointer to the row of the last tile's axis, its first element's index
        there, whether the row is inside, and the extent of that axis."""
        tensor, sizes = self.program.tensor(op.attributes["tensor"]), op.attributes["sizes"]
        last = max((axis for axis, size in enumerate(sizes) if size), default=-1)
        terms, inside, left = [f"p_{_c(tensor.name)}"], list[str](), list(outer)
        for axis, (size, start, stride) in enumerate(zip(sizes, starts, tensor.strides, strict=True)):
            if axis == last or (tensor.among and not axis): continue
            index = f"((s64){self.scalar(start)} + {left.pop(0) if size else '0'})"
            terms.append(f"{index} * {stride}ll")
            if not self.ranges.inside(tensor, axis, starts, max(size, 1)):
                inside.append(f"(u64){index} < (u64){self.extent(tensor, axis)}")
        inside = [each for each in inside if each not in self.given]
        first = f"(s64){self.scalar(starts[last])}" if last >= 0 else "0"
        return " + ".join(terms), first, " && ".join(inside) or "1", last

    def _lazy_load_block(self, op: Op, outer: Sequence[str], column: str, uniform: bool) -> str:
        tensor = self.program.tensor(op.attributes["tensor"])
        row, first, inside, last = self.row_pointer(op, op.operands, outer)
        other = constant_text(Constant(op.attributes["other"], tensor.dtype))
        kind, name = vector(tensor.dtype), short(tensor.dtype)
        if last < 0: return f"({inside}) ? ({kind})one_{name}({row}) : {other}"
        extent, stride, size = self.extent(tensor, last), tensor.strides[last], op.attributes["sizes"][last]
        place, within = f"{first} + ({column})", self.ranges.inside(tensor, last, op.operands, size)
        if uniform:
            one = f"({kind})one_{name}({row} + ({place}) * {stride}ll)"
            if not within: inside += f" && (u64)({place}) < {extent}"
            return one if inside == "1" else f"({inside}) ? {one} : {other}"
        if stride == 1:
            made = self._load_inside(name, f"{row} + {place}", column, size)
            beside = f"window_{name}({row}, {place}, {extent}, {other})"
            if not within: made = f"{self.flags[op]} ? {made} : {beside}"
            return made if inside == "1" else f"({inside}) ? {made} : {other}"
        return self._lanes(op.result.dtype, other, inside, f"{row} + ({place} + l) * {stride}ll",
                           f"(u64)({place} + l) < {extent}", name)

    def extent(self, tensor: TensorParameter, axis: int) -> int | str:
        """Elements of an axis."""
        if axis == tensor.symbolic: return COUNT
        return f"n_{_c(tensor.name)}" if tensor.among and axis else tensor.shape[axis]

    def flag(self, op: Op) -> None:
        """Says before all loops whether a block lies inside along the last axis, where that is not known:
        loops are compiled for either."""
        tensor, sizes = self.tensor(op), op.attributes["sizes"]
        last = max((axis for axis, size in enumerate(sizes) if size), default=-1)
        if last < 0 or self.ranges.inside(tensor, last, op.operands, sizes[last]): return
        first, end = self.scalar(op.operands[last]), f"{self.extent(tensor, last)} - {sizes[last]}"
        self.flags[op] = self.name("in")
        self.line(f"const int {self.flags[op]} = {first} >= 0 && {first} <= {end};")

    def _load_inside(self, name: str, address: str, column: str, size: int) -> str:
        """A vector from a column on of a row that lies inside; of its end the lanes that there are."""
        whole = f"load_{name}({address})"
        if not size % self.lanes: return whole
        rest = f"load_n_{name}({address}, {size} - ({column}))"
        return rest if size < self.lanes else f"({column}) + W <= {size} ? {whole} : {rest}"

    def store_inside(self, name: str, where: str, column: str, size: int) -> str:
        """Returns C that stores a vector from a column on of a row inside, of its end the lanes there are."""
        whole, rest = f"store_{name}({where})", f"store_n_{name}({where}, {size} - ({column}))"
        if not size % self.lanes: return whole
        return rest if size < self.lanes else f"if (({column}) + W <= {size}) {whole}; else {rest}"

    def _lanes(self, dtype: DType, other: str, head: str, address: str, inside: str, name: str) -> str:
        made = self.name()
        self.line(f"{vector(dtype)} {made} = {other};")
        self.line(f"if ({head}) for (s64 l = 0; l < W; l++) if ({inside}) {made}[l] = one_{name}({address});")
        return made

    def _lazy_load(self, op: Op, outer: Sequence[str], column: str, uniform: bool) -> str:
        tensor, shape = self.tensor(op), op.result.shape
        offsets, inside, other = (self.vector(each, outer, column, uniform) for each in op.operands)
        name, base = short(tensor.dtype), f"p_{_c(tensor.name)}"
        if shape and not uniform and self.is_row(*op.operands[:2]):
            there = self._load_inside(name, f"{base} + {offsets}[0]", column, shape[-1])
            return f"{inside}[0] ? ({there}) : {other}"
        bound = f"l < {shape[-1]} - ({column}) && " if shape and not uniform else ""
        return self._lanes(op.result.dtype, other, "1", f"{base} + {offsets}[l]", f"{bound}{inside}[l]", name)

    def is_row(self, offsets: Value, inside: Value) -> bool:
        """Whether the elements of each vector lie side by side, all or none of them inside."""
        return self.ranges.of(offsets).run >= self.lanes and self.ranges.of(inside).same >= self.lanes

    # **** forms ****

    def view(self, value: Value) -> View:
        """A value in memory, written there now if it is not."""
        form = self.forms[value]
        if isinstance(form, View): return form
        with self.in_strip(self.strip if self.strip and value in self.strip.values else None):
            made = self.targets.get(value) or self.allocate(value.dtype, value.shape or (1,))
            self.store_to(made, value)
        if value.shape:
            self.written_inside.append((value, form))
            self.forms[value] = made
        return made

    def store_to(self, target: View, value: Value) -> None:
        """Writes all elements of a value."""
        form = self.forms[value]
        if form is target: return
        if isinstance(form, View) and form.strides and form.strides[-1] != 1 and len(form.shape) > 1:
            return self._copy_elements(target, form)
        with self.loops(target.shape, self.is_limited(value)) as (outer, column):
            self.line(target.write(outer, column, self.vector(value, outer, column)))
        return None

    def _copy_elements(self, target: View, source: View) -> None:
        """Copies element by element, along the source's rows."""
        with self.outer_loops(target.shape) as places:
            self.line(f"*({target.at(places[:-1], places[-1])}) = *({source.at(places[:-1], places[-1])});")

    def place(self, op: Op) -> None:
        """Gives the results of an operation that can be lazy their form."""
        value = op.result
        if not value.shape:
            made = getattr(self, f"_lazy_{op.name}")(op, (), "0", True)
            self.forms[value] = self.variable(made, value.dtype)
            return
        self.forms[value] = op
        if op.name == "load_block": self.flag(op)
        if not self.stays(op): self.view(value)

    def stays(self, op: Op) -> bool:
        """Whether a value is computed where it is used."""
        value = op.result
        if op.name in ("broadcast", "reshape"): return bool(getattr(self, f"_{op.name}_stays")(op))
        loop = self._loop_of(value)
        if op.name in ("load_block", "load") and self._is_written_here(op):
            if op.name == "load" or not loop or not is_in_place(op, loop, self.region_now): return False
            self.first.setdefault(loop[-1], []).append(value)
            return True
        return op.name == "iota" or self._cheap(value) or self.once(value) or loop is not None

    def _is_written_here(self, op: Op) -> bool:
        """Whether this region writes the tensor of a load, or has its elements still where another does."""
        name = op.attributes["tensor"]
        return name in self.written and (op.result in self.region_now.yields or any(
            each.name in STORES and each.attributes["tensor"] == name for each in self.region_now.walk()))

    def once(self, value: Value) -> bool:
        """Whether a value has one use, in the region that is written now."""
        return self.uses[value] <= 1 and self.home.get(value) is self.region_now

    def _loop_of(self, value: Value) -> list[Op] | None:
        """The stores of the one loop that all uses of a value are in, by element operations; none of them
        where that is the loop of what a loop carries, of the region that is written now; None where there are
        others."""
        group: list[Op] | None = None
        left, seen = [value], set[Value]()
        while left:
            if (one := left.pop()) in seen: continue
            seen.add(one)
            for op in self.users.get(one, ()):
                if op.name in ("apply", "cast", "bitcast", "where_needed") or keeps_columns(op):
                    left.append(op.result)
                    continue
                carried = op is self.loop_now and one in self.together
                own = [] if carried else self.groups.get(op) if op.operands[-1] is one else None
                if own is None or group not in (None, own): return None
                group = own
        return group

    def _broadcast_stays(self, op: Op) -> bool:
        source = op.operands[0]
        form = self.forms[source]
        if isinstance(form, Op) and source.shape != op.result.shape:
            many = math.prod(op.result.shape) >= MANY_ROWS * math.prod(source.shape)
            if self._nodes(source) > (REPEATED_NODES if many else CHEAP_NODES): self.view(source)
        return self.once(op.result) or self._cheap(op.result)

    def _reshape_stays(self, op: Op) -> bool:
        source, value = op.operands[0], op.result
        form = self.forms[source]
        if isinstance(form, str): return True
        same = [e for e in source.shape if e > 1] == [e for e in value.shape if e > 1]
        lines_up = same and source.shape[-1:] == value.shape[-1:]
        if isinstance(form, Op) and not lines_up: form = self._lying(form, value.shape) or self.view(source)
        if isinstance(form, View):
            if (made := form.reshape(value.shape)) is None:
                dense = self._dense(form)
                made = dense.reshape(value.shape)
                assert made is not None
            self.forms[value] = made
            return True
        return self.once(value) or self._cheap(value)

    def _lying(self, op: Op, shape: Sequence[int]) -> View | None:
        """A block as it lies in its tensor, where all of it is known to be inside and the rows of `shape` are
        whole vectors; None elsewhere."""
        if op.name != "load_block" or shape[-1] % self.lanes: return None
        tensor, sizes = self.tensor(op), op.attributes["sizes"]
        row, first, inside, last = self.row_pointer(op, op.operands, ["0"] * (len(op.result.shape) - 1))
        if last < 0 or inside != "1" or tensor.strides[last] != 1: return None
        if not self.ranges.inside(tensor, last, op.operands, sizes[last]): return None
        strides = tuple(stride for size, stride in zip(sizes, tensor.strides, strict=True) if size)
        return View(f"({row} + {first})", tensor.dtype, op.result.shape, strides)

    def _dense(self, view: View) -> View:
        """A copy whose rows follow each other without padding."""
        count = 1
        for extent in view.shape: count *= extent
        flat = self.allocate(view.dtype, (count,))
        strides = [1]
        for extent in reversed(view.shape[1:]): strides.append(strides[-1] * extent)
        made = View(flat.base, view.dtype, view.shape, tuple(reversed(strides)))
        self._copy_elements(made, view)
        return made

    def _cheap(self, value: Value) -> bool:
        return self._nodes(value) <= CHEAP_NODES

    def _nodes(self, value: Value, most: int = CHEAP_NODES) -> int:
        """Operations of a value that is computed where it is used; of more than `most` some."""
        form = self.forms.get(value)
        if not isinstance(form, Op): return 0
        if form.name == "load_block" and self._is_plain(form): return 1
        if form.name in ("load_block", "load", "reduce", "where_needed", "interleave"): return CHEAP_NODES + 1
        if form.name == "apply" and LANGUAGE_OPERATIONS[form.attributes["fn"]].cost > 1:
            return CHEAP_NODES + 1
        made = int(form.name in ("apply", "cast"))
        for each in form.operands * (2 if form.name == "deinterleave" else 1):    # of two vectors each
            if made <= most: made += self._nodes(each, most - made)
        return made

    def _is_plain(self, op: Op) -> bool:
        """Whether a block is read by whole vectors from where it lies."""
        sizes = op.attributes["sizes"]
        return bool(sizes) and sizes[-1] > 0

    def tensor(self, op: Op) -> TensorParameter:
        """The tensor of an access."""
        return self.program.tensor(op.attributes["tensor"])


def _c(name: str) -> str: return name.replace(".", "_")


c_name = _c
