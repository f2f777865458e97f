"""Dots: their operands on the way to them, and products by mma.sync.

Protocol: what dots multiply is in shared memory, from where it is made on until its last dot (staged.py), or
in registers: the accumulator of one dot, rounded to 16 bits, is the left operand of the next
(FlashAttention-2). Sums stay in the accumulator's layout, in registers of their own. Sums of 8-bit floats
that tensor cores cut are added to float32 after 128 of K (tile/gemm/mma/plan.py).
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad.dtype import DType

from tinygrad_nv.ptx.builder import Value as Register
from tinygrad_nv.tile.fragments import Fragments, instruction
from tinygrad_nv.tile.gemm.mma.plan import PROMOTED_STEPS, needs_promotion
from tinygrad_nv.tile.lanes import kind_of
from tinygrad_nv.tile.language.gpu import elements
from tinygrad_nv.tile.language.gpu.arena import Access
from tinygrad_nv.tile.language.gpu.dots import FP8, GROUP_ROWS, LEAST, DotPlan, Role, source_of
from tinygrad_nv.tile.language.gpu.fma import multiply_add
from tinygrad_nv.tile.language.gpu.held import Held
from tinygrad_nv.tile.language.gpu.layout import LANE_BITS, Layout, bits_of
from tinygrad_nv.tile.language.gpu.staged import ALIGN, BlockCopy, SharedOperand, from_registers, tile_in_smem
from tinygrad_nv.tile.language.gpu.values import Values
from tinygrad_nv.tile.language.gpu.wgmma import PROMOTED_K, GroupOperand, issue, issue_in_halves
from tinygrad_nv.tile.language.ir import Op, Region, Value

READ_AHEAD = 4      # fragments of 16 columns between their ldmatrix and their products
MOST_KEPT = 184     # registers of carried values, products and left operands that leave room for others
Sums = dict[int, Register]      # by register of the accumulator


class Dots(Values):
    """Dots and their operands."""

    def prepare_dots(self) -> None:
        """Finds which operands lie in shared memory, and until when."""
        self.in_shared: dict[Value, SharedOperand] = {}
        self.done: dict[Op, Sums] = {}      # products that a loop has issued an iteration ahead
        self.late: dict[Op, Sums] = {}      # where products go that the loop around them waits for
        self.groups_later: dict[Op, int] = {}   # of those with a left operand in registers: wgmma.py
        self.flying: set[Op] = set()        # whose products are waited for by the loop around them
        self.kept: dict[Op, list[dict[int, list[Register]]]] = {}    # left operands of a loop: steps, 16 rows
        self._readers: dict[tuple[object, ...], Fragments] = {}
        self._last: dict[Op, list[Value]] = {}
        self._find_last(self.program.body)

    def _find_last(self, region: Region) -> None:
        """The operation of a region that multiplies each value of the region last."""
        found: dict[Value, Op] = {}
        own = {each for op in region.ops for each in op.results}
        for op in region.ops:
            for inner in op.regions: self._find_last(inner)
            dots = [op, *(each for inner in op.regions for each in inner.walk())]
            for dot in (each for each in dots if each.name == "dot"):
                for operand in dot.operands[:2]:
                    source, _ = source_of(operand, self.makers)
                    if source in own: found[source] = op
        for value, op in found.items(): self._last.setdefault(op, []).append(value)

    # **** operands ****

    def place(self, value: Value) -> SharedOperand:
        """Shared memory for what dots multiply."""
        tile = tile_in_smem(*self.assignment.smem_extents(value), value.dtype)
        made = SharedOperand(self.arena.take(tile.nbytes, ALIGN), tile, value.dtype)
        self.in_shared[value] = made
        return made

    def stage(self, op: Op) -> bool:
        """Copies a block that is loaded for dots alone to shared memory; False of another."""
        value = op.result
        if value not in self.assignment.staged: return False
        tensor = self.program.tensor(op.attributes["tensor"])
        to = self.place(value)
        copy = BlockCopy(self, tensor, self.pointers[tensor.name], op.attributes["sizes"],
                         [self.ranges.of(each) for each in op.operands], to.tile)
        written = Access("shared", to.start, to.start + to.tile.nbytes, True)
        self.arena.accesses(written, *[Access(tensor.name, 0, 1, False)] * tensor.output)
        copy.issue([self.number(each) for each in op.operands], self.arena.address + to.start)
        self.kb.cp_async_commit()
        self.arena.unfenced = True
        return True

    def to_shared(self, op: Op) -> None:
        """Behind an operation: what it made goes to shared memory where a dot needs it there; what it was the
        last to multiply is given back."""
        for value in op.results:
            roles = self.assignment.roles.get(value, ())
            if value in self.in_shared or value in self.assignment.staged: continue
            if any(not self.assignment.in_registers(value, role) for role in roles):
                from_registers(self, self.value(value), self.place(value))
        for value in self._last.get(op, ()):
            found = self.in_shared.pop(value, None)
            if found is not None and found.base is None: self.arena.give(found.start)

    def operand(self, value: Value) -> SharedOperand:
        """A dot's operand in shared memory."""
        source, _ = source_of(value, self.makers)
        if source not in self.in_shared: from_registers(self, self.value(source), self.place(source))
        return self.in_shared[source]

    def _roles(self, op: Op) -> list[Role]:
        """The operands of a dot, those in shared memory ready to be read."""
        roles = [Role(op, side, source_of(op.operands[side], self.makers)[1]) for side in range(2)]
        kept = [(op in self.kept and not role.side) or self.assignment.in_registers(
            source_of(op.operands[role.side], self.makers)[0], role) for role in roles]
        found = [self.operand(op.operands[role.side]) for role in roles if not kept[role.side]]
        self.arena.accesses(*(Access("shared", each.start, each.start + each.tile.nbytes, False)
                              for each in found if each.base is None))
        return roles

    # **** dots ****

    def do_dot(self, op: Op) -> None:
        plan = self.assignment.plans[op]
        total = op.operands[2]
        layout = plan.layout(self.assignment.thread_bits)
        if op in self.done: return self._put_sums(op, layout, self.done.pop(op))
        held = self.value(total, layout)
        flying = op in self.flying
        fresh = not flying and op not in self.late and plan.kind == "wgmma" and self.is_zero(total)
        if op in self.late: sums = self._move_sums(self.late[op], held)
        else: sums = self._own(held) if flying else self._sums(held, fresh)
        roles = self._roles(op)
        if plan.kind == "fma":
            multiply_add(self, plan, layout, sums, self._smem_operand(op, roles[0]),
                         self._smem_operand(op, roles[1]))
        elif plan.kind == "wgmma": self._multiply_grouped(op, plan, sums, roles, fresh)
        else: self._multiply(op, plan, sums, roles)
        for side in range(2): self._give_arguments(op.operands[side])
        return self._put_sums(op, layout, sums)

    def _put_sums(self, op: Op, layout: Layout, sums: Sums) -> None:
        parts = self.parts(op.result.dtype, op.result.shape, layout,
                           [sums.get(i) for i in range(layout.count)])
        self.put_held(op.result, Held(op.result.dtype, op.result.shape, layout, parts))

    def is_zero(self, value: Value) -> bool:
        """Whether a value is known to be 0 throughout."""
        return all(part is None or elements.constant_number(part) == 0 for part in self.value(value).parts)

    def _smem_operand(self, op: Op, role: Role) -> tuple[SharedOperand, Role]:
        return self.operand(op.operands[role.side]), role

    def _give_arguments(self, value: Value) -> None:
        """Arguments of regions are in shared memory for one dot."""
        source, _ = source_of(value, self.makers)
        if source not in self.makers and source in self.in_shared:
            self.arena.give(self.in_shared.pop(source).start)

    def _move_sums(self, sums: Sums, held: Held) -> Sums:
        """Moves what is added to to some registers."""
        for register, to in sums.items():
            value = held.element(register)
            if not isinstance(value, Register) or value.name != to.name: to.set(value)
        return sums

    def _own(self, held: Held) -> Sums:
        """The registers that a loop carries sums in."""
        found = {register: held.element(register) for register in held.inside()}
        return {register: one for register, one in found.items() if isinstance(one, Register)}

    def _sums(self, held: Held, fresh: bool) -> Sums:
        """Registers of their own with what is added to; `fresh` ones hold nothing."""
        kind = kind_of(held.dtype)
        if fresh: return {register: self.kb.reg(kind) for register in held.inside()}
        return {register: self.kb.reg(kind, held.element(register)) for register in held.inside()}

    def _multiply_grouped(self, op: Op, plan: DotPlan, sums: Sums, roles: Sequence[Role],
                          fresh: bool) -> None:
        """By wgmma."""
        kinds = op.operands[0].dtype, op.operands[1].dtype
        steps = plan.depth // plan.step
        left, right = self._group_left(op, plan, roles[0], steps), self._group_operand(op, plan, roles[1])
        if kinds[0] in FP8 and not (fresh and plan.depth <= PROMOTED_K):
            return self._promote_sums(plan, kinds, sums, left, right, fresh)
        if op in self.groups_later and not isinstance(left, GroupOperand):
            return issue_in_halves(self, plan, kinds, sums, left, right, self.groups_later[op])
        issue(self, plan, kinds, sums, left, right, fresh, range(steps))
        if op not in self.flying and op not in self.late: self.kb.wgmma_wait(0)

    def _promote_sums(self, plan: DotPlan, kinds: tuple[DType, DType], sums: Sums,
                  left: GroupOperand | dict[tuple[int, int], list[Register]], right: GroupOperand,
                  fresh: bool) -> None:
        """Adds 64 rows and 128 of K at a time to float32."""
        steps, at_once, below = plan.depth // plan.step, PROMOTED_K // plan.step, bits_of(plan.n)
        indices = plan.layout(self.assignment.thread_bits).indices
        for first in range(0, steps, at_once):
            for m in range(0, plan.m, GROUP_ROWS * plan.groups_m):
                mine = [register for register in sums if indices[register] >> below & ~15 == m]
                partial = {register: self.kb.reg("f32") for register in mine}
                some = range(first, min(first + at_once, steps))
                issue(self, plan, kinds, partial, left, right, True, some, [m])
                self.kb.wgmma_wait(0)
                for register, one in partial.items():
                    if fresh and not first: sums[register].set(one)
                    else: sums[register] += one

    def issue_grouped(self, op: Op, sums: Sums) -> None:
        """Products by wgmma to fresh sums, which are waited for elsewhere."""
        plan, kinds = self.assignment.plans[op], (op.operands[0].dtype, op.operands[1].dtype)
        roles = self._roles(op)
        steps = plan.depth // plan.step
        left, right = self._group_left(op, plan, roles[0], steps), self._group_operand(op, plan, roles[1])
        issue(self, plan, kinds, sums, left, right, True, range(steps))

    def _group_operand(self, op: Op, plan: DotPlan, role: Role) -> GroupOperand:
        return GroupOperand(self, plan, self.operand(op.operands[role.side]), role)

    def _group_left(self, op: Op, plan: DotPlan, role: Role,
                    steps: int) -> GroupOperand | dict[tuple[int, int], list[Register]]:
        """The left operand: where it lies, or its registers by rows and step."""
        source, _ = source_of(op.operands[0], self.makers)
        if not self.assignment.in_registers(source, role): return self._group_operand(op, plan, role)
        left = _Left(None, self.value(source), bits_of(plan.k))
        return {(m, step): left.read(m, step) for m in range(0, plan.m, GROUP_ROWS * plan.groups_m)
                for step in range(steps)}

    def _multiply(self, op: Op, plan: DotPlan, sums: Sums, roles: Sequence[Role]) -> None:
        """By mma.sync."""
        a, b = op.operands[0].dtype, op.operands[1].dtype
        steps = plan.depth // plan.step
        left, right = self._lhs_operand(op, plan, roles[0], steps), self._fragments(op, plan, roles[1],
                                                                                     steps)
        shape, types = instruction(a, b)
        cut = needs_promotion(a, self.kb.arch)
        at_once = PROMOTED_STEPS if cut else steps
        for first in range(0, steps, at_once):
            some = range(first, min(first + at_once, steps))
            if not cut: self._steps(plan, sums, left, right, some, shape, types)
            else:
                partial = {register: self.kb.reg("f32", 0.0) for register in sums}
                self._steps(plan, partial, left, right, some, shape, types)
                for register, one in partial.items(): sums[register] += one

    def _steps(self, plan: DotPlan, sums: Sums, left: _Left, right: Fragments, steps: range, shape: str,
               types: str) -> None:
        kb, layout = self.kb, plan.layout(self.assignment.thread_bits)
        columns, kind = bits_of(plan.n), types[:3]
        zero = 0.0 if kind == "f32" else 0
        pieces = [(step, n) for step in steps for n in range(0, plan.n, LEAST * plan.warps_n)]
        read: list[list[Register]] = []
        for number, (step, n) in enumerate(pieces):
            for later, at in pieces[len(read):number + READ_AHEAD + 1]:
                read.append(kb.regs("b32", 4))
                right.load_one(at // LEAST, later, read[-1])
            if n == 0: rows = {m: left.read(m, step) for m in range(0, plan.m, LEAST * plan.warps_m)}
            for half in range(2 if n + 8 < plan.n else 1):
                for m, a in rows.items():
                    places = [layout.numbers[m + 8 * (r >> 1) << columns | n + 8 * half + (r & 1)]
                              for r in range(4)]
                    d = [sums[i] if i in sums else kb.reg(kind, zero) for i in places]
                    kb.mma(shape, types, d, a, read[number][2 * half:2 * half + 2], d)

    def _lhs_operand(self, op: Op, plan: DotPlan, role: Role, steps: int) -> _Left:
        if op in self.kept: return _Left(None, kept=self.kept[op])
        source, _ = source_of(op.operands[0], self.makers)
        if self.assignment.in_registers(source, role): return _Left(None, self.value(source), bits_of(plan.k))
        return _Left(self._fragments(op, plan, role, steps))

    def _fragments(self, op: Op, plan: DotPlan, role: Role, steps: int) -> Fragments:
        """How a warp reads an operand. What depends on the thread alone is made once for operands alike."""
        kb, found = self.kb, self.operand(op.operands[role.side])
        count, below = (plan.warps_n, plan.warps_m) if role.side else (plan.warps_m, 1)
        key = (found.tile, found.dtype, role.mn_major, role.side, count, below, steps)
        if key not in self._readers:
            with self.threads.prelude():
                if count == 1: first = kb.reg("u32", 0)
                else: first = (kb.tid.x >> LANE_BITS + below.bit_length() - 1 & count - 1) * LEAST
                self._readers[key] = Fragments(kb, found.dtype, found.tile, role.mn_major, bool(role.side),
                                               first, LEAST, steps, 0)
        made = self._readers[key]
        made.move(found.address(self))
        return made

    def keep_left(self, op: Op, groups: int) -> None:
        """Reads left operands that a loop does not change to registers, where there is room; `groups` of
        cp.async that have been started since they were may still be on their way."""
        region = op.regions[0]
        inside = {each for one in region.walk() for each in one.results}
        dots = [one for one in region.ops if one.name == "dot" and self._keeps(one, inside)]
        if not dots or self._crowd(op) + sum(map(self._words, dots)) > MOST_KEPT: return
        self.kb.cp_async_wait(groups)
        self.arena.note_sync()
        self.kb.sync(*self.arena.barrier)
        for one in dots:
            plan, role = self.assignment.plans[one], Role(one, 0, source_of(one.operands[0], self.makers)[1])
            steps, found = plan.depth // plan.step, self.operand(one.operands[0])
            if found.base is None: self.arena.reads(found.start, found.tile.nbytes)
            left = self._lhs_operand(one, plan, role, steps)
            self.kept[one] = [{m: left.read(m, step) for m in range(0, plan.m, LEAST * plan.warps_m)}
                              for step in range(steps)]

    def _keeps(self, dot: Op, inside: set[Value]) -> bool:
        source, _ = source_of(dot.operands[0], self.makers)
        return self.assignment.plans[dot].kind == "mma" and source in self.in_shared and source not in inside

    def _words(self, dot: Op) -> int:
        """Registers of a dot's left operand."""
        plan = self.assignment.plans[dot]
        return -(-plan.m // (LEAST * plan.warps_m)) * (plan.depth // plan.step) * 4

    def _crowd(self, op: Op) -> int:
        """Registers of what a loop carries, and of the largest product in it."""
        layout, region = self.assignment.layout, op.regions[0]
        dots = [one for one in region.ops if one.name == "dot" and one.result not in region.yields]
        return sum(layout(each).count for each in region.arguments[1:] if each.shape) + \
            max((layout(one.result).count for one in dots), default=0)


class _Left:
    """The left operand, 16 rows of a step at a time."""

    def __init__(self, fragments: Fragments | None, held: Held | None = None, columns: int = 0,
                 kept: list[dict[int, list[Register]]] | None = None) -> None:
        self.fragments, self.held, self.columns, self.kept = fragments, held, columns, kept

    def read(self, m: int, step: int) -> list[Register]:
        """Four registers of rows from `m` on."""
        if self.kept is not None: return self.kept[step][m]
        if self.fragments is not None:
            four = self.fragments.kb.regs("b32", 4)
            self.fragments.load_one(m // LEAST, step, four)
            return four
        assert self.held is not None
        made = []
        for r in range(4):
            index = m + 8 * (r & 1) << self.columns | LEAST * step + 8 * (r >> 1)
            part = self.held.parts[self.held.layout.numbers[index] // 2]
            assert part is not None
            made.append(part.pair())
        return made


