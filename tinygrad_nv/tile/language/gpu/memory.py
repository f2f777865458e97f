"""Loads, stores and atomics of a program.

Protocol: a block is accessed in vectors as wide as its layout, its place and its tensor's alignment allow. A
result that threads hold copies of is loaded by all of them, and stored or changed by the first alone. Floats
are added in vectors from sm_90 on, where nothing looks at the elements before. A store
of a large tile whose lanes do not fill sectors goes to a layout of wide vectors first, within warps
(swaps.py) or by way of shared memory. A tensor that the program writes is in order: a barrier stands between
what one thread writes and another reads.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Value as Register
from tinygrad_nv.tile.lanes import Lanes, Number, kind_of
from tinygrad_nv.tile.language.gpu.access import fetch, store
from tinygrad_nv.tile.language.gpu.blocks import BlockPlace
from tinygrad_nv.tile.language.gpu.convert import by_shared, convert_layout, pair_parts
from tinygrad_nv.tile.language.gpu.early import Early, find_early
from tinygrad_nv.tile.language.gpu.elements import apply_row, constant_number
from tinygrad_nv.tile.language.gpu.held import Held, Part
from tinygrad_nv.tile.language.gpu.layout import Layout, absent, block_layout, extents
from tinygrad_nv.tile.language.gpu.swaps import FULL, lanes_along, plan_swaps, swap_registers
from tinygrad_nv.tile.language.gpu.values import Values
from tinygrad_nv.tile.language.ir import Op, TensorParameter, Value

REPLACED = 16       # bytes of a store below which a large tile changes its layout first
SECTOR = 32         # bytes of memory that are written at once: lanes side by side that fill them are as good
LARGE = 2048        # elements of a large tile
BLOCKS = ("load_block", "store_block")
FEW_PROGRAMS = 264  # of a kernel that prefetches: more have what all read in L2 by others
LINE = 128


def touches_memory(op: Op) -> bool:
    """Whether an operation reads or writes tensors, or one within it does."""
    return "tensor" in op.attributes or any(map(touches_memory, (x for each in op.regions for x in each.ops)))


class Memory(Values):
    """Accesses to tensors. `ahead`: the kernel ahead has not been waited for. `alone`: one lane loads, and
    others do not come to barriers of its warp."""
    alone = False

    @cached_property
    def early(self) -> Early:
        """Loads that stay ahead of others."""
        return find_early(self.program, self.assignment.uses)

    def _tensor(self, op: Op, write: bool) -> TensorParameter:
        tensor = self.program.tensor(op.attributes["tensor"])
        if tensor.output:
            note = self.arena.writes if write else self.arena.reads
            note(*self._columns(op, tensor), tensor.name, self._owners(op))
        return tensor

    def _owners(self, op: Op) -> tuple[Layout, tuple[int, ...]] | None:
        """The layout and the sizes that say which thread touches an element; None where more is needed."""
        value = op.results[0] if op.results else op.operands[-1]
        if op.name not in BLOCKS or value in self.assignment.free or self.assignment.aside(value): return None
        sizes, layout = op.attributes["sizes"], self.assignment.layout(value)
        if layout.copies: return None
        known = map(self.ranges.of, op.operands)
        whole = all(not size or (not size & size - 1 and at.multiple % size == 0)
                    for size, at in zip(sizes, known, strict=False))
        return (layout, sizes) if whole else None

    def _columns(self, op: Op, tensor: TensorParameter) -> tuple[int, int]:
        """The first index of the last axis that an access may touch, and how many: of those that touch others
        none waits for the other."""
        if "sizes" not in op.attributes or not tensor.shape: return 0, math.prod(tensor.shape)
        known = self.ranges.of(op.operands[len(tensor.shape) - 1])
        return known.low, known.high - known.low + max(op.attributes["sizes"][-1], 1)

    # **** blocks ****

    def do_load_block(self, op: Op) -> None:
        result = op.result
        layout = self.assignment.layout(result)
        tensor = self._tensor(op, False)
        if op in self.early.scalars and not self.alone: self.kb.emit("bar.warp.sync", FULL)
        at = BlockPlace(self, tensor, op.attributes["sizes"], op.operands, layout, False)
        space = "global" if op in self.early.tiles else self.space(tensor)
        self.put(result, self._fetch_block(at, op.attributes["other"], result.shape, space), layout)

    def _fetch_block(self, at: BlockPlace, other: float, shape: tuple[int, ...], space: str) -> list[Part]:
        gone, count, tensor = absent(at.layout, shape), at.vector(), at.tensor
        width = 1 if at.layout.count == 1 else 2
        parts: list[Part] = []
        singles: list[Part] = []
        for register in range(0, at.layout.count, count):
            if all(gone[register:register + count]):
                if count == 1: singles.append(None)
                else: parts += [None] * (count // 2)
                continue
            found = fetch(self.kb, at.base, at.offset(register), tensor.dtype, count, at.guard(register),
                            other, space)
            if count == 1: singles += found
            else: parts += found
        return parts or (singles if width == 1 else pair_parts(singles))

    def space(self, tensor: TensorParameter) -> str:
        """Returns the space that a tensor is loaded from: one that the program does not write never changes,
        but where the kernel ahead may write it: ptxas moves ld.global.nc to before griddepcontrol.wait."""
        return "global" if tensor.output or self.pdl else "global.nc"

    # **** the kernel ahead ****

    def before(self, op: Op) -> bool:
        if self.ahead and touches_memory(op):
            if math.prod(self.program.grid) <= FEW_PROGRAMS: self._prefetch_shared(op)
            self.await_ahead()
        return super().before(op)

    def await_ahead(self) -> None:
        """Waits for the kernel ahead, and lets the one behind begin."""
        self.ahead = False
        self.kb.wait_for_previous_grid()
        self.kb.launch_dependents()

    def _prefetch_shared(self, first: Op) -> None:
        """Has L2 fetch the blocks that all programs load, weights, while the kernel ahead still runs. One
        thread asks for a line."""
        ops = self.program.body.ops
        for op in ops[ops.index(first):]:
            if op.name != "load_block" or op.result in self.assignment.staged: continue
            if self.program.tensor(op.attributes["tensor"]).output: continue
            known = [self.ranges.of(each) for each in op.operands]
            if any(each.low != each.high or self.scopes.get(start) is None
                   for each, start in zip(known, op.operands, strict=True)): continue
            layout, kb = self.assignment.layout(op.result), self.kb
            at = BlockPlace(self, self.program.tensor(op.attributes["tensor"]), op.attributes["sizes"],
                            op.operands, layout, False)
            begins = (at.base.to("u32") & LINE - 1) == 0
            for register in range(0, layout.count, at.vector()):
                if at.offset(register) % LINE: continue
                guard = at.guard(register)
                kb.emit("prefetch.global.L2", at.base.at(at.offset(register)),
                        guard=begins if guard is None else begins & guard)

    def do_store_block(self, op: Op) -> None:
        *starts, value = op.operands
        tensor = self.program.tensor(op.attributes["tensor"])
        held = self.value(value)
        at = BlockPlace(self, tensor, op.attributes["sizes"], starts, held.layout, True)
        if narrow := self._narrow(at, held):
            held = self._wider(at, held)
            at = BlockPlace(self, tensor, op.attributes["sizes"], starts, held.layout, True)
        self.arena.writes(*self._columns(op, tensor), tensor.name, None if narrow else self._owners(op))
        self._store_block(at, held)

    def _narrow(self, at: BlockPlace, held: Held) -> bool:
        """Whether a store of a large tile writes sectors of memory in parts."""
        last, size = len(at.sizes) - 1, at.tensor.dtype.itemsize
        if math.prod(held.shape) < LARGE or not at.axes or at.axes[-1] != last: return False
        along = extents(held.shape).of_axis(len(held.shape) - 1)
        vector = at.vector()
        return vector * size < REPLACED and lanes_along(held.layout, along, vector) * size < SECTOR

    def _wider(self, at: BlockPlace, held: Held) -> Held:
        """The tile in a layout with longer vectors, where there is one: within warps, else by way of shared
        memory."""
        size = at.tensor.dtype.itemsize
        vector = max(min(REPLACED // size, self.assignment.vector), 1)
        swaps = plan_swaps(held, vector)
        made = swaps.layout if swaps is not None else \
            block_layout(held.shape, len(held.shape) - 1, vector, self.assignment.thread_bits)
        if BlockPlace(self, at.tensor, at.sizes, at.starts, made, True).vector() <= at.vector(): return held
        return convert_layout(self, held, made) if swaps is None else swap_registers(self, held, swaps)

    def _store_block(self, at: BlockPlace, held: Held) -> None:
        layout = at.layout
        gone, count = absent(layout, held.shape), at.vector()
        mine = self.threads.first(layout.copies)
        for register in range(0, layout.count, count):
            if gone[register]: continue
            first = register // held.width
            some = held.parts[first:first + max(count // held.width, 1)]
            parts = [part for part in some if part is not None]
            store(self.kb, at.base, at.offset(register), parts, count, at.guard(register, mine),
                   first=register % held.width if count == 1 else 0)

    # **** elements at offsets ****

    def _places(self, op: Op, tensor: TensorParameter, offsets: Value, mask: Value,
                layout: Layout) -> _Offsets:
        return _Offsets(self, tensor, self.value(offsets, layout), self.value(mask, layout),
                        self._group(tensor, offsets, mask, layout))

    def _group(self, tensor: TensorParameter, offsets: Value, mask: Value, layout: Layout) -> int:
        """Elements that lie side by side, inside or outside together."""
        if not offsets.shape: return 1
        known, tested = self.ranges.of(offsets), self.ranges.of(mask)
        last = len(offsets.shape) - 1
        made = min(known.run, tested.same, max(16 // tensor.dtype.itemsize, 1), layout.count,
                   layout.run(extents(offsets.shape).of_axis(last)))
        while made > 1 and (known.group_multiple(made) % made or offsets.shape[last] % made
                            or tensor.offset % made): made //= 2
        return made

    def do_load(self, op: Op) -> None:
        offsets, mask, other = op.operands
        result = op.result
        layout = self.assignment.layout(result)
        tensor = self._tensor(op, False)
        at = self._places(op, tensor, offsets, mask, layout)
        gone, default = absent(layout, result.shape), self.scalar(other)
        parts: list[Part] = []
        for register in range(0, layout.count, at.group):
            if gone[register]: parts += [None] * max(at.group // 2, 1)
            else: parts += at.fetch(register, default)
        self.put(result, parts if at.group > 1 or layout.count == 1 else pair_parts(parts), layout)

    def do_store(self, op: Op) -> None:
        offsets, value, mask = op.operands
        tensor = self._tensor(op, True)
        layout = self.assignment.layout(next((each for each in (value, offsets, mask)
                                              if each not in self.assignment.free), value))
        at = self._places(op, tensor, offsets, mask, layout)
        held = self.value(value, layout)
        gone, mine = absent(layout, held.shape), self.threads.first(layout.copies)
        for register in range(0, layout.count, at.group):
            if gone[register]: continue
            guard = at.guard(register, mine)
            start = register // held.width
            parts = [part for part in held.parts[start:start + max(at.group // held.width, 1)]
                     if part is not None]
            store(self.kb, at.address(register), 0, parts, at.group, guard,
                   first=register % held.width if at.group == 1 else 0)

    def do_atomic(self, op: Op) -> None:
        offsets, value, mask = op.operands
        result = op.result
        layout = self.assignment.layout(result) if result.shape else self.assignment.nowhere
        tensor = self._tensor(op, True)
        needed, fn = bool(self.assignment.uses.get(result)), op.attributes["fn"]
        at = self._places(op, tensor, offsets, mask, layout)
        if needed or fn != "add" or tensor.dtype != dtypes.float32 or not self.kb.hopper: at.group = 1
        held, gone = self.value(value, layout), absent(layout, result.shape)
        if at.group > 1: return self._add_vectors(at, held, gone)
        mine, kind = self.threads.first(layout.copies), kind_of(tensor.dtype)
        found: list[Number | None] = []
        for register in range(layout.count):
            if gone[register]: found.append(None)
            else:
                found.append(self._atomic(fn, at.address(register), held.element(register), kind,
                                          at.guard(register, mine), needed))
        if not needed: return
        made = Held(result.dtype, result.shape, layout, self.parts(result.dtype, result.shape, layout, found))
        if layout.copies: made = self.from_first(made)
        self.scopes.put(result, made)

    def _add_vectors(self, at: _Offsets, held: Held, gone: Sequence[bool]) -> None:
        """Adds floats that lie side by side at once."""
        mine = self.threads.first(held.layout.copies)
        for register in range(0, held.layout.count, at.group):
            if gone[register]: continue
            some = [held.element(register + i) for i in range(at.group)]
            given = [each if isinstance(each, Register) else self.kb.reg("f32", each) for each in some]
            self.kb.emit(f"red.relaxed.gpu.global.add.v{at.group}.f32", at.address(register).at(), given,
                         guard=at.guard(register, mine))

    def _atomic(self, fn: str, address: Register, value: Number, kind: str, guard: Register | None,
                needed: bool) -> Number:
        kb = self.kb
        name = {"exchange": "exch"}.get(fn, fn)
        typed = "b32" if name in ("exch", "and", "or", "xor") else kind
        given = value if isinstance(value, Register) else kb.reg(kind, value)
        if not needed and name != "exch":
            kb.emit(f"red.relaxed.gpu.global.{name}.{typed}", address.at(), given, guard=guard)
            return 0
        made = kb.reg(kind, 0.0 if kind == "f32" else 0)
        kb.emit(f"atom.relaxed.gpu.global.{name}.{typed}", made, address.at(), given, guard=guard)
        return made

    def from_first(self, held: Held) -> Held:
        """A tile that the first of each group of threads with copies holds, in all of them."""
        return by_shared(self, held, held.layout, held.shape)

    def do_barrier(self, op: Op) -> None: self.arena.sync()


class _Offsets:
    """Elements at offsets of a tensor where a mask holds, `group` of them side by side."""

    def __init__(self, writer: Memory, tensor: TensorParameter, offsets: Held, mask: Held,
                 group: int) -> None:
        self.writer, self.kb, self.tensor, self.offsets, self.mask, self.group = \
            writer, writer.kb, tensor, offsets, mask, group

    def address(self, register: int) -> Register:
        """Returns the address of what a register holds."""
        kb, size = self.kb, self.tensor.dtype.itemsize
        offset, made = self.offsets.element(register), kb.reg("u64")
        pointer = self.writer.pointers[self.tensor.name]
        if isinstance(offset, Register): kb.emit("mad.wide.s32", made, offset, size, pointer)
        else: kb.emit("add.s64", made, pointer, int(offset) * size)
        return made

    def guard(self, register: int, mine: Register | None) -> Register | None:
        """Returns where it may be touched."""
        test = self.mask.element(register)
        made = test if isinstance(test, Register) else None if test else self.kb.reg("pred", 0)
        for each in (mine, self.writer.inside(self.offsets.layout, self.offsets.shape, register)):
            if each is not None: made = each if made is None else made & each
        return made

    def fetch(self, register: int, other: Lanes) -> list[Lanes]:
        """Returns what is there; `other` elsewhere."""
        guard, number = self.guard(register, None), constant_number(other)
        parts = fetch(self.kb, self.address(register), 0, self.tensor.dtype, self.group, guard, number or 0,
                        self.writer.space(self.tensor))
        if number is not None or guard is None: return parts
        test = Lanes(self.kb, dtypes.bool, [guard])
        return [apply_row(self.kb, "where", [test, part, other]) for part in parts]

