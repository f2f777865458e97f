"""The layouts of a program's tiles.

Protocol: values that an operation makes element by element of each other are a class, with one layout; so are
what a loop carries and what enters and leaves it. `Assignment(program, …)` joins classes, then gives layouts:

    1. the accumulators of dots, and what hangs on them: rows of them, their transposes 2. the other classes,
    the largest first: of the rows of a larger tile, those of its layout; else vectors of
       the tensor that is loaded or stored; else vectors of the last axis

Two kinds of values have none. `free` ones are made of constants, scalars and indices alone: they are computed
in whatever layout asks. `staged` ones are loaded for dots alone and go to shared memory without registers.
Where an operation meets another layout than its own, convert.py goes between: the assignment is about speed.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tinygrad_nv.tile.language.gpu.dots import DotPlan, Role, plan_dot, source_of
from tinygrad_nv.tile.language.gpu.layout import (
    LANE_BITS,
    NONE,
    Layout,
    accumulator,
    block_layout,
    broadcast_bits,
    columns_layout,
    extents,
    keeps_order,
    ranks_layout,
    transpose_bits,
)
from tinygrad_nv.tile.language.ir import Op, Program, Region, TileType, Value
from tinygrad_nv.tile.language.ranges import uses

ELEMENTS = ("apply", "cast", "bitcast")
VECTOR_BYTES = 16
LOADED = 2              # what a load's bytes count for beside a store's
MOST_SCANNED = 64       # elements of a column that one thread adds up


@dataclass(eq=False)
class _Class:
    """Values of one layout: the largest access to memory, dots that add to them, and other classes that
    follow this one, with the bits that they lack or where bits go; the axis of a scan that threads go
    through; whether its numbers are ranked."""
    type: TileType
    bytes: int = 0
    vector: int = 0
    contiguous: int = -1
    scanned: tuple[tuple[int, ...], int] | None = None
    ranked: bool = False
    dots: list[Op] = field(default_factory=list)
    narrow: list[tuple[Value, tuple[int, ...]]] = field(default_factory=list)
    same: list[tuple[Value, Mapping[int, int]]] = field(default_factory=list)
    layout: Layout | None = None


class Assignment:
    """Layouts for so many warps; `vector`: elements of an access at most."""

    def __init__(self, program: Program, warps: int, vector: int, arch: str) -> None:
        self.program, self.vector = program, vector
        self.thread_bits = LANE_BITS + warps.bit_length() - 1
        self.warps, self.arch = warps, arch
        self.uses = uses(program.body)
        self.makers = {each: op for op in program.body.walk() for each in op.results}
        self.free = self._free()
        self.roles = self._roles()
        self.staged = {each for each in self.roles if self._only_for_dots(each)}
        self.plans: dict[Op, DotPlan] = {}
        self._parents: dict[Value, Value] = {}
        self._classes: dict[Value, _Class] = {}
        self._join(program.body)
        self._anchor()
        self._give()

    def layout(self, value: Value) -> Layout:
        """Returns the layout of a value; of a scalar and of a free value one that asks for nothing."""
        if not value.shape: return self.nowhere
        if value in self.free: return self.default(value.shape)
        made = self._class(value).layout
        assert made is not None
        return made

    @property
    def nowhere(self) -> Layout:
        """Layout of a scalar: all threads have it."""
        return Layout((), (NONE,) * self.thread_bits)

    def default(self, shape: Sequence[int]) -> Layout:
        """Vectors of the last axis."""
        return block_layout(shape, len(shape) - 1, self.vector, self.thread_bits) if shape else self.nowhere

    # **** classes ****

    def _free(self) -> set[Value]:
        """Values that any layout can have at once."""
        made: set[Value] = set()
        for op in self.program.body.walk():
            given = [each for each in op.operands if each.shape]
            pure = op.name in (*ELEMENTS, "iota", "broadcast", "reshape", "transpose", "interleave",
                               "deinterleave")
            if not pure or not op.result.shape or not all(each in made for each in given): continue
            if op.name == "reshape" and not keeps_order(op.operands[0].shape, op.result.shape): continue
            if not any(use.name == "dot" and op.result in use.operands[:2]
                       for use in self.uses.get(op.result, ())):
                made.add(op.result)
        return made

    def _root(self, value: Value) -> Value:
        while (above := self._parents.get(value, value)) is not value: value = above
        return value

    def _class(self, value: Value) -> _Class:
        root = self._root(value)
        if root not in self._classes: self._classes[root] = _Class(root.type)
        return self._classes[root]

    def _together(self, values: Iterable[Value]) -> None:
        first = None
        for each in values:
            if not each.shape or each in self.free: continue
            root = self._root(each)
            if first is None or root is first: first = root
            # of one order and several shapes, the longest last axis tells what lies side by side
            elif root.shape[-1] > first.shape[-1]: self._parents[first], first = root, root
            else: self._parents[root] = first

    def _join(self, region: Region) -> None:
        for op in region.ops:
            for inner in op.regions: self._join(inner)
            for group in _groups(op): self._together(group)

    def _anchor(self) -> None:
        """Finds what each class is loaded from or added to by, and what follows it."""
        for op in self.program.body.walk():
            if op.name == "dot" and op.result.shape: self._class(op.result).dots.append(op)
            elif op.name in ("load_block", "load", "atomic") and op.result.shape:
                if op.result not in self.staged: self._memory(op, op.result, LOADED)
            elif op.name == "store_block" and op.operands[-1].shape: self._memory(op, op.operands[-1], 1)
            elif op.name == "store" and op.operands[1].shape: self._memory(op, op.operands[1], 1)
            elif op.name == "broadcast" and op.operands[0].shape and op.operands[0] not in self.free:
                gone = broadcast_bits(op.operands[0].shape, op.result.shape)
                self._class(op.result).narrow.append((op.operands[0], gone))
            elif op.name == "reduce":
                wide = op.operands[0]
                if wide not in self.free and op.results[0].shape:
                    gone = tuple(extents(wide.shape).of_axis(op.attributes["axis"]))
                    self._class(wide).narrow += [(each, gone) for each in op.results]
            elif op.name == "scan" and is_by_threads(op):
                self._class(op.results[0]).scanned = op.results[0].shape, op.attributes["axis"]
            elif op.name == "rank": self._class(op.results[0]).ranked = True
            elif op.name in ("halves", "interleave"):
                for each in op.operands:
                    if each not in self.free: self._class(op.result).narrow.append((each, (0,)))
            elif op.name == "deinterleave" and op.operands[0] not in self.free:
                self._class(op.operands[0]).narrow.append((op.result, (0,)))
            elif op.name == "transpose" and op.operands[0] not in self.free:
                to = transpose_bits(op.operands[0].shape, op.attributes["permutation"])
                self._class(op.operands[0]).same.append((op.result, to))
                self._class(op.result).same.append((op.operands[0], {b: a for a, b in to.items()}))

    def _memory(self, op: Op, value: Value, weight: int) -> None:
        if value in self.free: return
        of, size = self._class(value), self.program.tensor(op.attributes["tensor"]).dtype.itemsize
        nbytes = weight * size * math.prod(value.shape)
        if nbytes <= of.bytes: return
        side_by_side = op.attributes.get("sizes", value.shape)[-1] > 0
        of.type, of.bytes, of.contiguous = value.type, nbytes, len(value.shape) - 1
        of.vector = max(min(VECTOR_BYTES // size, self.vector), 1) if side_by_side else 1

    # **** layouts ****

    def _give(self) -> None:
        made = list({id(each): each for value in self._values() for each in [self._class(value)]}.values())
        for each in made:
            for op in each.dots:
                self.plans[op] = plan_dot(op, self._operands(op), self.is_chained(op), self.warps, self.arch)
        for each in made:
            if each.dots: self._set_layout(each, self.plans[each.dots[0]].layout(self.thread_bits))
        for op in self.plans: self._keep_left(op)
        for each in sorted(made, key=lambda one: -math.prod(one.type.shape)):
            if each.layout is None: self._set_layout(each, self._own(each))

    def _keep_left(self, op: Op) -> None:
        """Gives a left operand that is made of fewer bytes, as of codes, the layout in which wgmma takes it
        from registers."""
        plan, (source, flipped) = self.plans[op], source_of(op.operands[0], self.makers)
        if plan.kind != "wgmma" or plan.warps_n > 1 or flipped or plan.k % plan.step: return
        if source in self.free or self.aside(source) or not extents(source.shape).exact: return
        of, loaded = self._class(source), LOADED * source.dtype.itemsize * math.prod(source.shape)
        if source.dtype.itemsize == 2 and of.bytes < loaded:
            self._set_layout(of, accumulator((plan.m, plan.k), plan.warps_m, 1))

    def _values(self) -> Iterable[Value]:
        for op in self.program.body.walk():
            for region in op.regions: yield from (each for each in region.arguments if each.shape)
            yield from (each for each in op.results if each.shape and each not in self.free
                        and not self.aside(each))

    def aside(self, value: Value) -> bool:
        """Whether a value is staged, or the transpose of one."""
        return value in self.makers and source_of(value, self.makers)[0] in self.staged

    def _own(self, of: _Class) -> Layout:
        if of.ranked: return ranks_layout(of.type.shape, self.thread_bits)
        if of.scanned is not None: return columns_layout(*of.scanned, self.thread_bits)
        for value, gone in of.narrow:
            known = None if value in self.free else self._class(value).layout
            if known is not None and (wide := known.repeat_along(gone)) is not None: return wide
        if of.contiguous < 0: return self.default(of.type.shape)
        return block_layout(of.type.shape, of.contiguous, of.vector, self.thread_bits)

    def _set_layout(self, of: _Class, layout: Layout) -> None:
        """Sets the layout of a class, and of those that follow it."""
        if of.layout is not None: return
        of.layout = layout
        for value, gone in of.narrow:
            if value not in self.free: self._set_layout(self._class(value), layout.without(gone))
        for value, to in of.same:
            if value not in self.free: self._set_layout(self._class(value), layout.move_bits(to))

    # **** dots ****

    def _roles(self) -> dict[Value, list[Role]]:
        """Returns what dots multiply, before it is transposed, and as what."""
        made: dict[Value, list[Role]] = {}
        for op in self.program.body.walk():
            if op.name != "dot": continue
            for side in range(2):
                source, flipped = source_of(op.operands[side], self.makers)
                made.setdefault(source, []).append(Role(op, side, flipped))
        return made

    def _operands(self, op: Op) -> list[Role]:
        return [Role(op, side, source_of(op.operands[side], self.makers)[1]) for side in range(2)]

    def _only_for_dots(self, value: Value) -> bool:
        """Whether a value is loaded in rows of memory, and for dots alone."""
        op = self.makers.get(value)
        if op is None or op.name != "load_block" or len(value.shape) != 2: return False
        return op.attributes["sizes"][-1] > 0 and op.attributes["other"] == 0 and self._is_multiplied(value)

    def _is_multiplied(self, value: Value) -> bool:
        for use in self.uses.get(value, ()):
            if use.name == "transpose" and self._is_multiplied(use.result): continue
            if use.name != "dot" or value is use.operands[2]: return False
        return True

    def in_registers(self, value: Value, role: Role) -> bool:
        """Whether a left operand is multiplied from the registers where it is."""
        plan = self.plans[role.op]
        if plan.kind == "fma" or role.side or role.flipped or plan.warps_n > 1 or value.dtype.itemsize != 2:
            return False
        if value in self.staged or plan.k % plan.step: return False
        return self.layout(value) == accumulator((plan.m, plan.k), plan.warps_m, 1)

    def smem_extents(self, value: Value) -> tuple[int, int]:
        """Rows and columns that dots read of a value in shared memory; its own where no dot does."""
        if value not in self.roles:
            rows, columns = (1, *value.shape)[-2:]
            return rows, columns
        roles = [role for role in self.roles[value] if not self.in_registers(value, role)]
        each = [role.extents(self.plans[role.op]) for role in roles]
        return max(rows for rows, _ in each), max(columns for _, columns in each)

    def is_chained(self, op: Op) -> bool:
        """Whether rows of a dot's result belong together: they are reduced, or multiplied from the left; or
        rows of such a result are what is multiplied."""
        of = self._class(op.result)
        source, flipped = source_of(op.operands[0], self.makers)
        if not flipped and source not in self.staged and source not in self.free and self._class(source).dots:
            return True
        for other in self.program.body.walk():
            if other.name == "reduce" and other.operands[0] not in self.free and \
                    self._class(other.operands[0]) is of and other.attributes["axis"] == 1: return True
            if other.name == "dot":
                source, flipped = source_of(other.operands[0], self.makers)
                if not flipped and source not in self.free and source.shape and self._class(source) is of:
                    return True
        return False


def is_by_threads(op: Op) -> bool:
    """Whether each thread of a scan goes through all of its axis."""
    axis, shape = op.attributes["axis"], op.operands[0].shape
    return axis < len(shape) - 1 and shape[axis] <= MOST_SCANNED


def _groups(op: Op) -> list[Sequence[Value]]:
    """Values that an operation keeps in one layout."""
    if op.name == "scan" and is_by_threads(op): return [op.results]
    if op.name in ELEMENTS or op.name in ("sort", "scan", "load", "store", "atomic"):
        return [(*op.operands, *op.results)]
    if op.name == "where_needed": return [(*op.operands, *op.regions[0].yields, op.result)]
    if op.name == "reshape" and keeps_order(op.operands[0].shape, op.result.shape):
        return [(op.operands[0], op.result)]
    if op.name == "reduce": return [op.operands, op.results]
    if op.name == "rank": return [(op.operands[0], op.results[0])]
    if op.name == "gather": return [(op.operands[1], op.result)]
    if op.name == "dot": return [(op.operands[2], op.result)]
    if op.name == "if":
        return list(zip(op.results, *(r.yields for r in op.regions), strict=True))
    if op.name in ("for", "while"):
        start = 3 if op.name == "for" else 0
        body = op.regions[-1]
        groups = zip(op.operands[start:], body.arguments[1 if start else 0:], body.yields, op.results,
                     strict=True)
        made: list[Sequence[Value]] = list(groups)
        if op.name == "while": made += list(zip(op.operands, op.regions[0].arguments, strict=True))
        return made
    return []
