"""Values of the program while it is written: the base of what emits its operations.

Protocol: `value(v, layout)` is a value in a layout, converted where it has another (convert.py); of a free
value it is computed in that layout, where it is used. `put` keeps what an operation has made. Operations that
move or compute elements without crossing threads are here; all others are in the classes above this one.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, Label
from tinygrad_nv.ptx.builder import Value as Register
from tinygrad_nv.tile.lanes import Lanes, Number
from tinygrad_nv.tile.language.gpu import elements
from tinygrad_nv.tile.language.gpu.arena import Arena
from tinygrad_nv.tile.language.gpu.assign import Assignment
from tinygrad_nv.tile.language.gpu.convert import by_shared, convert_layout, inside
from tinygrad_nv.tile.language.gpu.held import Held, Part, Scopes, gather_parts, map_parts
from tinygrad_nv.tile.language.gpu.layout import (
    Layout,
    absent,
    broadcast_bits,
    extents,
    keeps_order,
    transpose_bits,
)
from tinygrad_nv.tile.language.gpu.threads import Threads
from tinygrad_nv.tile.language.ir import Op, Program, Region, Value
from tinygrad_nv.tile.language.ranges import Ranges


class Values:
    """A kernel under construction, and what its values are."""

    def __init__(self, kb: Kernel, program: Program, assignment: Assignment) -> None:
        self.kb, self.program, self.assignment = kb, program, assignment
        self.extents: dict[str, Register] = {}      # elements of tensors that were chosen, by their choice
        among = {name for each in program.choices for name in each.among}
        among -= {op.attributes["tensor"] for op in program.body.walk() if "tensor" in op.attributes}
        self.labels: dict[str, Label] = {}      # of tensors that are chosen
        self.pointers: dict[str, Register] = {}
        for i, each in enumerate(program.tensors):
            name = f"p{i}_{_identifier(each.name)}"
            if each.name in among: self.labels[each.name] = kb.late_pointer(name)
            else: self.pointers[each.name] = kb.pointer(name)
        for each in (*program.views, *program.tensors):
            if each.name in among: continue
            begin = self.pointers[each.of or each.name]
            self.pointers[each.name] = begin + each.offset * each.dtype.itemsize if each.offset else begin
        self.row_count = kb.param("m", "u32").to("s32") if program.rows else None
        self.ranges = Ranges(program)
        self.threads = Threads(kb, assignment.thread_bits)
        self.arena = Arena(kb)
        self.scopes = Scopes()
        self.makers = assignment.makers
        self.pdl = self.ahead = False   # another kernel may run ahead, and has not been waited for
        self.numbers: tuple[Number, Number, Number] | None = None     # of a CTA that goes through programs

    def region(self, region: Region) -> None:
        """The operations of a region, in this scope."""
        for op in region.ops:
            if not self.before(op): getattr(self, f"do_{op.name}")(op)
            self.after_op(op)

    def before(self, op: Op) -> bool:
        """Whether an operation is written in another way."""
        raise NotImplementedError

    def after_op(self, op: Op) -> None:
        """Runs behind an operation."""
        raise NotImplementedError

    # **** values ****

    def value(self, value: Value, layout: Layout | None = None) -> Held:
        """A value in a layout, by default in its own."""
        if value in self.assignment.free: return self._free(value, layout or self.assignment.layout(value))
        found = self.scopes.get(value)
        assert found is not None, f"{value.type} is used before it is made"
        if layout is None or not value.shape or found.layout == layout: return found
        return convert_layout(self, found, layout)

    def scalar(self, value: Value) -> Lanes:
        """A scalar."""
        return self.value(value).scalar

    def number(self, value: Value) -> Number:
        """A scalar in a register, or as a number that is known."""
        return self.scalar(value).at(0)

    def put(self, value: Value, parts: Sequence[Part], layout: Layout | None = None) -> None:
        """Binds what an operation has made."""
        layout = layout or self.assignment.layout(value)
        self.scopes.put(value, Held(value.dtype, value.shape, layout, list(parts)))

    def put_scalar(self, value: Value, part: Lanes) -> None: self.put(value, [part], self.assignment.nowhere)

    def _free(self, value: Value, layout: Layout) -> Held:
        """A free value in a layout, made where it is used."""
        if (found := self.scopes.get(value, layout)) is None:
            found = self._make_held(self.makers[value], layout)
            self.scopes.put(value, found, layout)
        return found

    def _make_held(self, op: Op, layout: Layout) -> Held:
        """The result of an operation on whole tiles in a layout, of operands in layouts that fit it."""
        result = op.result
        parts = getattr(self, f"_{op.name}")(op, layout)
        return Held(result.dtype, result.shape, layout, parts)

    def _emit(self, op: Op) -> None:
        result = op.result
        if result in self.assignment.free or self.assignment.aside(result): return
        if result.shape or op.name in ("apply", "cast", "bitcast"):
            layout = self.assignment.layout(result)
            self.scopes.put(result, self._make_held(op, layout))
        else: self.put_scalar(result, self._only(op.operands[0]))

    def _only(self, value: Value) -> Lanes:
        """The one element of a tile of one, as a scalar."""
        part = self.value(value).parts[0]
        assert part is not None
        return Lanes(self.kb, value.dtype, [part.at(0)])

    do_iota = do_apply = do_cast = do_bitcast = do_broadcast = do_reshape = do_transpose = _emit

    # **** operations on whole tiles ****

    def do_constant(self, op: Op) -> None:
        self.put_scalar(op.result, elements.constant(self.kb, op.attributes["value"], op.result.dtype))

    def do_program_id(self, op: Op) -> None:
        axis = "xyz"[op.attributes["axis"]]
        if self.program.grid[op.attributes["axis"]] == 1:
            return self.put_scalar(op.result, Lanes(self.kb, dtypes.int32, [0]))
        if self.numbers is not None:
            return self.put_scalar(op.result, Lanes(self.kb, dtypes.int32, [self.numbers["xyz".index(axis)]]))
        made = self.kb.reg("s32")
        self.kb.emit("mov.b32", made, getattr(self.kb.ctaid, axis))
        return self.put_scalar(op.result, Lanes(self.kb, dtypes.int32, [made]))

    def _iota(self, op: Op, layout: Layout) -> list[Part]:
        own = self.threads.coordinate(layout, op.result.shape, 0)
        numbers: list[Number] = []
        for index in layout.indices:
            if isinstance(own, Register): numbers.append(own + index if index else own)
            else: numbers.append(own + index)
        return self.parts(dtypes.int32, op.result.shape, layout, numbers)

    def parts(self, dtype: DType, shape: tuple[int, ...], layout: Layout,
              numbers: Sequence[Number | None]) -> list[Part]:
        """Parts of wide values, one for each register."""
        gone, width = absent(layout, shape), 1 if layout.count == 1 else 2
        made: list[Part] = []
        for at in range(0, layout.count, width):
            wide = [number for i,
                    number in enumerate(numbers[at:at + width]) if number is not None and not gone[at + i]]
            if len(wide) == 2 and wide[0] is wide[1]: wide = wide[:1]
            made.append(Lanes(self.kb, dtype, wide) if wide else None)
        return made

    def _apply(self, op: Op, layout: Layout) -> list[Part]:
        fn, given = op.attributes["fn"], self._operands(op, layout)
        alike = fn == "div" and 2 * len(set(map(id, given[1]))) <= len(given[1])
        if alike and op.result.dtype == dtypes.float32:
            return map_parts(elements.Divider(self.kb), *given)
        return map_parts(lambda *parts: elements.apply_row(self.kb, fn, parts), *given)

    def _operands(self, op: Op, layout: Layout) -> list[list[Part]]:
        return [self.value(each, layout).parts for each in op.operands]

    def _cast(self, op: Op, layout: Layout) -> list[Part]:
        return map_parts(lambda part: elements.cast(part, op.result.dtype), *self._operands(op, layout))

    def _bitcast(self, op: Op, layout: Layout) -> list[Part]:
        return map_parts(lambda part: elements.bitcast(part, op.result.dtype), *self._operands(op, layout))

    do_halves = do_interleave = do_deinterleave = _emit

    def _deinterleave(self, op: Op, layout: Layout) -> list[Part]:
        """Every second register of a layout that has pairs side by side."""
        held, gone = self.value(op.operands[0], layout.with_pair_axis), absent(layout, op.result.shape)
        registers = [None if gone[i] else 2 * i + op.attributes["odd"] for i in range(layout.count)]
        return gather_parts(self.kb, held, registers, op.result.dtype)

    def _halves(self, op: Op, layout: Layout) -> list[Part]:
        """A word is a pair of registers; to a layout that has them apart the tile is moved."""
        source, result = op.operands[0], op.result
        if layout.registers[:1] != (0,):
            pairs = self.assignment.layout(source).with_pair_axis
            held = Held(result.dtype, result.shape, pairs, self._halves(op, pairs))
            return convert_layout(self, held, layout).parts
        words = self.value(source, layout.without((0,)))
        known: dict[tuple[int, int], Part] = {}
        made: list[Part] = []
        for register in range(words.layout.count):
            part, at = words.parts[register // words.width], register % words.width
            if part is not None and (id(part), at) not in known:
                pair = self.kb.reg("b32")
                self.kb.emit("mov.b32", pair, part.register(at))
                known[id(part), at] = Lanes(self.kb, result.dtype, [], pair)
            made.append(None if part is None else known[id(part), at])
        return made

    def _interleave(self, op: Op, layout: Layout) -> list[Part]:
        """A register of one operand or of the other; where threads side by side have what lies side by side,
        each has both, and chooses."""
        narrow, dtype = layout.without((0,)), op.result.dtype
        helds = [self.value(each, narrow) for each in op.operands]
        later = [self.threads.bit(at) for at, _ in layout.thread_bits((0,))]
        made: list[Number | None] = []
        for index, gone in zip(layout.indices, absent(layout, op.result.shape), strict=True):
            register = narrow.numbers[index >> 1]
            if gone or any(held.parts[register // held.width] is None for held in helds): made.append(None)
            elif not later: made.append(helds[index & 1].element(register))
            else:
                test, *each = (Lanes(self.kb, kind, [x]) for kind, x in (
                    (dtypes.bool, later[0]), *((dtype, held.element(register)) for held in helds[::-1])))
                made.append(elements.apply_row(self.kb, "where", [test, *each]).at(0))
        return self.parts(dtype, op.result.shape, layout, made)

    def _broadcast(self, op: Op, layout: Layout) -> list[Part]:
        source, shape = op.operands[0], op.result.shape
        gone = broadcast_bits(source.shape, shape)
        held = self.value(source, layout.without(gone)) if source.shape else self.value(source)
        missing, kept = absent(layout, shape), [bit for bit in layout.registers if bit not in gone]
        places = [layout.registers.index(bit) for bit in kept]
        registers: list[int | None] = [
            None if missing[i] else sum((i >> place & 1) << at for at, place in enumerate(places))
            for i in range(layout.count)]
        if not source.shape: registers = [None if each is None else 0 for each in registers]
        return gather_parts(self.kb, held, registers, source.dtype)

    def _reshape(self, op: Op, layout: Layout) -> list[Part]:
        source, shape = op.operands[0], op.result.shape
        if not source.shape:
            return gather_parts(self.kb, self.value(source), [0] * layout.count, source.dtype)
        if keeps_order(source.shape, shape): return self.value(source, layout).parts
        return by_shared(self, self.value(source), layout, shape).parts

    def _transpose(self, op: Op, layout: Layout) -> list[Part]:
        source = op.operands[0]
        back = {to: bit for bit, to in transpose_bits(source.shape, op.attributes["permutation"]).items()}
        return self.value(source, layout.move_bits(back)).parts

    def inside(self, layout: Layout, shape: tuple[int, ...], register: int,
               axes: Sequence[int] = ()) -> Register | None:
        """Whether what a register holds is an element of the tile, along some axes or all; None where it is
        in every thread."""
        return inside(self, layout, shape, register, axes)

    def put_held(self, value: Value, held: Held) -> None:
        """Binds what an operation has made, in the layout of its value."""
        layout = self.assignment.layout(value)
        if value.shape and held.layout != layout: held = convert_layout(self, held, layout)
        self.scopes.put(value, held)

    def index(self, held: Held, register: int, axis: int) -> Number:
        """The place along an axis of what a register holds: s32."""
        own = self.threads.coordinate(held.layout, held.shape, axis)
        more = extents(held.shape).coordinate(held.layout.indices[register], axis)
        if isinstance(own, Register): return own + more if more else own
        return own + more


def _identifier(name: str) -> str: return "".join(each if each.isalnum() else "_" for each in name)
