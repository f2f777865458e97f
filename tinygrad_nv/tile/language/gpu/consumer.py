"""Loops of a program's warps over stages that a producer fills.

Protocol: dots of a loop are of three kinds. Those that wait for their operands alone (`early`) are issued an
iteration ahead, where their registers are free: behind what looks at the products before. Those whose result
the next iteration begins with (`late`) stay in flight until that is looked at, or, where the next iteration
only adds to it, until the next products are issued (`chained`). Others are waited for at once. A stage is
given back when the products that read it are done.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tinygrad_nv.ptx.builder import Value as Register
from tinygrad_nv.tile.lanes import Number, kind_of
from tinygrad_nv.tile.language.gpu.control import Carried
from tinygrad_nv.tile.language.gpu.dots import FP8, Role, source_of
from tinygrad_nv.tile.language.gpu.layout import absent
from tinygrad_nv.tile.language.gpu.pipelines import Pipelines
from tinygrad_nv.tile.language.gpu.pipelining import adds_alone
from tinygrad_nv.tile.language.gpu.staged import SharedOperand
from tinygrad_nv.tile.language.gpu.wgmma import halves_of
from tinygrad_nv.tile.language.ir import Op
from tinygrad_nv.tile.pipeline import Pipeline, PipelineState


@dataclass(eq=False)
class Stages:
    """The ring of a loop: where it is, its tiles, maps and barriers. `again`: the loop may run several times;
    `has_inner_loops`: it has others inside. `at`: where the ring is, of the side that is being written."""
    start: int
    stage_bytes: int
    places: dict[Op, SharedOperand]
    maps: dict[Op, Register]
    ring: Pipeline
    again: bool
    has_inner_loops: bool
    at: PipelineState = field(init=False)


@dataclass(frozen=True, eq=False)
class Flight:
    """Dots of a loop whose products are waited for in the next iteration, and those that are issued ahead."""
    late: Sequence[Op]
    early: Sequence[Op]


class Consumer:
    """A loop that is being written."""

    def __init__(self, writer: Pipelines, op: Op, stages: Stages, carried: Carried) -> None:
        self.writer, self.kb, self.op, self.stages, self.carried = writer, writer.kb, op, stages, carried
        self.ring, self.at = stages.ring, stages.at
        self.reads = any(load.result not in writer.assignment.staged for load in stages.places)
        self.first = writer.arena.address + stages.start
        self.last, self.empty = self.kb.reg("u32", 0), self.ring.empty_barriers()
        mine = writer.threads.first(31)
        assert mine is not None
        self.mine = mine
        dots = [one for one in op.regions[0].walk() if one.name == "dot"]
        self.adds = all(adds_alone(one, op, writer.assignment.uses) for one in dots)
        self.late = self._late() if self.ring.depth > 2 and not stages.has_inner_loops else {}
        self.early = [] if stages.has_inner_loops else self._early()
        self.chained = {dot for dot, position in self.late.items()
                        if writer.assignment.uses[op.regions[0].arguments[position + 1]] == [dot]}
        self.waited, self.unissued = True, False
        self.next_at = self._behind_early()
        for dot, position in self.late.items(): writer.late[dot] = carried.sums(position)
        groups = {dot: self._groups_of(dot) for dot in self.late}
        self.groups = sum(groups.values())      # of an iteration's products that stay in flight
        for dot in filter(self._reads_registers, self.late): writer.groups_later[dot] = self.groups - 1
        if not self.early: return
        self.ring.wait(self.at)
        self._issue_early(self.first + self.at.stage * stages.stage_bytes)
        if self.late: self.kb.wgmma_commit()    # none: each iteration finds those of the one before

    @property
    def flight(self) -> Flight: return Flight(tuple(self.late), tuple(each.op for each in self.early))

    # **** kinds of dots ****

    def _late(self) -> dict[Op, int]:
        """Dots whose result the loop carries, at the place that only operations ahead of them use."""
        region, uses = self.op.regions[0], self.writer.assignment.uses
        made: dict[Op, int] = {}
        for number, one in enumerate(region.ops):
            if one.name != "dot" or one.operands[0].dtype in FP8 or uses[one.result] != [self.op]: continue
            position = region.yields.index(one.result)
            before = region.ops[:number + 1]
            if all(use in before
                   for use in uses.get(region.arguments[position + 1], ())) and self._stays_in_smem(one):
                made[one] = position
        return made

    def _stays_in_smem(self, dot: Op) -> bool:
        """Whether a dot's operands stay where they are until the next iteration: in shared memory, or in
        registers that each iteration makes anew, where the loop has no other dots."""
        writer = self.writer
        for side in range(2):
            source, _ = source_of(dot.operands[side], writer.makers)
            if writer.makers.get(source) in self.stages.places: continue
            inside = any(source in one.results for one in self.op.regions[0].ops)
            if inside and self.adds and not side and self._reads_registers(dot): continue
            if inside or source not in writer.in_shared: return False
        return True

    def _reads_registers(self, dot: Op) -> bool:
        source, flipped = source_of(dot.operands[0], self.writer.makers)
        return self.writer.assignment.in_registers(source, Role(dot, 0, flipped))

    def _groups_of(self, dot: Op) -> int:
        plan = self.writer.assignment.plans[dot]
        return len(halves_of(plan.depth // plan.step)) if self._reads_registers(dot) else 1

    def _early(self) -> list[EarlyDot]:
        """Dots that wait for their operands alone. There must be an iteration."""
        writer, made = self.writer, list[EarlyDot]()
        start, stop = (writer.ranges.of(each) for each in self.op.operands[:2])
        if self.ring.depth < 2 or start.high >= stop.low: return []
        for one in self.op.regions[0].ops:
            if one.name != "dot" or one.operands[0].dtype in FP8 or one in self.late: continue
            total = one.operands[2]
            if total in writer.assignment.free and self._ready(one) and writer.is_zero(total):
                made.append(EarlyDot(one, self._sums_of(one)))
        return made

    def _ready(self, dot: Op) -> bool:
        sources = [source_of(each, self.writer.makers)[0] for each in dot.operands[:2]]
        inside = {each for one in self.op.regions[0].ops for each in one.results}
        return all(self.writer.makers.get(each) in self.stages.places
                   or (each in self.writer.in_shared and each not in inside) for each in sources)

    def _behind_early(self) -> Op | None:
        """The first operation behind those that look at products of early dots, and at multiples of them:
        from there on their registers are free."""
        region, uses = self.op.regions[0], self.writer.assignment.uses
        values = {each.op.result for each in self.early}
        for one in region.ops:
            if one.name == "apply" and one.attributes["fn"] == "mul" and \
                    any(each in values for each in one.operands): values.add(one.result)
        users = {use for each in values for use in uses.get(each, ())}
        last = max((number for number, one in enumerate(region.ops)
                    if one in users or any(inner in users for side in one.regions for inner in side.walk())),
                   default=-1)
        return region.ops[last + 1] if last + 1 < len(region.ops) else None

    def _sums_of(self, op: Op) -> dict[int, Register]:
        writer = self.writer
        layout = writer.assignment.plans[op].layout(writer.assignment.thread_bits)
        kind, gone = kind_of(op.result.dtype), absent(layout, op.result.shape)
        return {register: self.kb.reg(kind) for register in range(layout.count) if not gone[register]}

    def _issue_early(self, stage: Register) -> None:
        """Products of the stage at a shared address; what the iteration itself reads stays where it is."""
        shared = self.writer.in_shared
        before = {load.result: shared.get(load.result) for load in self.stages.places}
        for load, place in self.stages.places.items(): shared[load.result] = place.at(stage)
        for each in self.early: self.writer.issue_grouped(each.op, each.sums)
        for value, found in before.items():
            if found is None: del shared[value]
            else: shared[value] = found

    # **** an iteration ****

    def begin(self, more: Register, further: Register) -> None:
        """Waits for the stage, or takes the products of it."""
        self.more, self.further, self.waited = more, further, not self.late
        if not self.early: self.ring.wait(self.at)
        else:
            self.kb.wgmma_wait(self.groups)
            for each in self.early: self.writer.done[each.op] = each.sums
        self.unissued = bool(self.early)
        self.stage = self.first + self.at.stage * self.stages.stage_bytes

    def _issue_next(self) -> None:
        """Products of the next iteration, the last one's once more where there is none."""
        kb, ring, at = self.kb, self.ring, self.at
        following = PipelineState(ring, kb.reg("u32", at.stage), kb.reg("u32", at.parity))
        following.advance()
        chosen = PipelineState(ring, kb.select(self.more, following.stage, at.stage, "u32"),
                               kb.select(self.more, following.parity, at.parity, "u32"))
        ring.wait(chosen)
        self._issue_early(self.first + chosen.stage * self.stages.stage_bytes)
        self.unissued = False

    def before_use(self, op: Op) -> None:
        """Waits ahead of an operation until what it looks at is there."""
        if self.unissued and op is self.next_at: self._issue_next()
        if self.waited or op in self.chained: return
        arguments = [self.op.regions[0].arguments[position + 1] for position in self.late.values()]
        values = [*op.operands, *(each for region in op.regions for each in region.yields)]
        if any(each in arguments for each in values): self._wait(0 if self.unissued else len(self.early))

    def _wait(self, groups: int) -> None:
        self.kb.wgmma_wait(groups)
        self._release(self.last, self.mine & self.further)
        self.waited = True

    def end(self) -> None:
        """Gives back the stage, or, where products stay in flight, the one before. Where the ring goes on
        behind the loop, products that were issued early read the last stage until they are waited for."""
        if self.unissued: self._issue_next()
        if not self.waited: self._wait(self.groups + len(self.early))
        if self.late or self._releases_after_loop: self.last.set(self.at.stage)
        if self._releases_after_loop: self._release(self.at.stage, self.mine & self.more)
        elif not self.late: self._release(self.at.stage, self.mine)
        self.at.advance()

    def _release(self, stage: Register, when: Register) -> None:
        """Gives back a stage: all lanes have read what goes to registers."""
        if self.reads: self.kb.emit("bar.warp.sync", -1)
        self.ring.release(self.empty, stage, when)

    @property
    def _releases_after_loop(self) -> bool:
        """Whether the last stage is given back behind the loop alone, others in their iterations."""
        return bool(self.early) and not self.late and self.stages.again

    def finish(self, start: Number, stop: Number) -> None:
        """Behind the loop, which went from `start` to `stop`."""
        if not self.late and not self.early: return
        self.kb.wgmma_wait(0)
        if not self.stages.again: return
        ran = start < stop if isinstance(start, Register) else stop > start
        if isinstance(ran, Register): self._release(self.last, self.mine & ran)
        elif ran: self._release(self.last, self.mine)


@dataclass(frozen=True, eq=False)
class EarlyDot:
    """A dot, and the registers that its products of the next iteration go to."""
    op: Op
    sums: dict[int, Register]


