"""Loops whose operands for dots are copied some iterations ahead.

Protocol: what a loop loads for dots alone, at places that follow from the loop's index, has a ring of `depth`
stages in shared memory. Iteration i, which reads stage i mod depth:

    ahead of the loop: the copies of iterations 0 … ahead - 1, each a group of cp.async
    wait until the group of iteration i is in, and all threads have read the stage before
    start the copies of iteration i + ahead, if there is one
    what the body computes

Which loops, and how far `ahead`, is their plan (pipelining.py): stages - 1, as the stage that is overwritten
was read one iteration before. Where dots by wgmma add to what the loop carries, and nothing else looks at
that, an iteration's products stay in flight until those of the next are issued; then the stage is free one
iteration later, and `ahead` is stages - 2.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Value as Register
from tinygrad_nv.tile.lanes import Lanes, Number
from tinygrad_nv.tile.language.gpu.arena import Access
from tinygrad_nv.tile.language.gpu.control import Control
from tinygrad_nv.tile.language.gpu.dot import Dots
from tinygrad_nv.tile.language.gpu.pipelining import LoopPlan, can_recompute
from tinygrad_nv.tile.language.gpu.staged import ALIGN, BlockCopy, SharedOperand, tile_in_smem, to_registers
from tinygrad_nv.tile.language.ir import Op, Region


@dataclass(eq=False)
class Stages:
    """Stages of `stage_bytes` from `start` on; `places`: where each load's tile begins in a stage."""
    start: int
    stage_bytes: int
    depth: int
    places: dict[Op, SharedOperand]
    copies: dict[Op, BlockCopy]

    @property
    def nbytes(self) -> int: return self.stage_bytes * self.depth


class Pipelines(Dots, Control):
    """Loops with stages, by their plans; `bound`: tiles that have been copied ahead, by their loads."""
    loop_plans: Mapping[Op, LoopPlan]
    bound: dict[Op, SharedOperand]

    def do_for(self, op: Op) -> None:
        plan = self.loop_plans.get(op)
        return super().do_for(op) if plan is None else self._emit_pipelined(op, plan)

    # **** what can be copied ahead ****

    def ops_of_places(self, loads: Sequence[Op], region: Region) -> list[Op]:
        """The operations of the body that make the places of loads."""
        made = {each: one for one in region.ops for each in one.results}
        wanted = {each for one in loads for each in one.operands}
        kept: list[Op] = []
        for one in reversed(region.ops):
            if can_recompute(one, self.program) and any(each in wanted for each in one.results):
                kept.insert(0, one)
                wanted |= {each for each in one.operands if each in made}
        return kept

    def starts(self, op: Op, loads: Sequence[Op], index: Number) -> dict[Op, list[Number]]:
        """Returns where loads of an iteration begin."""
        region = op.regions[0]
        self.scopes.push()
        self.put_scalar(region.arguments[0], Lanes(self.kb, dtypes.int32, [index]))
        for one in self.ops_of_places(loads, region): getattr(self, f"do_{one.name}")(one)
        places = {one: [self.number(each) for each in one.operands] for one in loads}
        self.scopes.pop()
        return places

    # **** the loop ****

    def _stages(self, loads: Sequence[Op], depth: int) -> Stages:
        places, copies, start = dict[Op, SharedOperand](), dict[Op, BlockCopy](), 0
        for one in loads:
            value, tensor = one.result, self.program.tensor(one.attributes["tensor"])
            tile = tile_in_smem(*self.assignment.smem_extents(value), value.dtype)
            places[one] = SharedOperand(start, tile, value.dtype)
            copies[one] = BlockCopy(self, tensor, self.pointers[tensor.name], one.attributes["sizes"],
                                    [self.ranges.of(each) for each in one.operands], tile)
            start += -(-tile.nbytes // ALIGN) * ALIGN
        return Stages(self.arena.take(start * depth, ALIGN), start, depth, places, copies)

    def _issue(self, op: Op, ring: Stages, index: Number, stage: Register, when: Register | None) -> None:
        """Starts the copies of an iteration."""
        places = self.starts(op, list(ring.copies), index)
        for one, copy in ring.copies.items(): copy.issue(places[one], stage + ring.places[one].start, when)
        self.kb.cp_async_commit()

    def _emit_pipelined(self, op: Op, plan: LoopPlan) -> None:
        kb, region = self.kb, op.regions[0]
        start, stop, step = (self.number(each) for each in op.operands[:3])
        index, *arguments = region.arguments
        carried, sums = self.enter_loop(op)
        ring, flight, ahead = self._stages(plan.loads, plan.stages), plan.flying, plan.ahead
        self.flying |= set(flight)
        self._begin(op, ring, (start, stop, step), ahead)
        self.keep_left(op, ahead)
        first = self.arena.address + ring.start
        mark, outer, end = self.arena.mark(), self.bound, first + ring.nbytes
        reading = kb.reg("u32", name="reading").set(first)
        writing = kb.reg("u32", name="writing").set(first + ahead * ring.stage_bytes)
        with kb.loop(start, stop, step, kind="s32") as i:
            kb.cp_async_wait(ahead - 1)
            self.arena.unfenced = True
            self.arena.note_sync()
            kb.sync(*self.arena.barrier)
            later = i + step * ahead
            self._issue(op, ring, later, writing, later < stop)
            self.arena.copying = False
            self._turn(writing, ring, end)
            self.bound = {one: place.at(reading) for one, place in ring.places.items()}
            self._body(region, carried, arguments, (index, i))
            if flight: kb.wgmma_wait(len(flight))
            self._turn(reading, ring, end)
        self.bound = outer
        self.kept.clear()
        if flight: kb.wgmma_wait(0)
        self.arena.leave(mark)
        self.arena.take_back(ring.start, ring.nbytes)
        self.leave_loop(op, carried, sums)

    def _begin(self, op: Op, ring: Stages, bounds: tuple[Number, Number, Number], ahead: int) -> None:
        """Starts the copies of the first iterations, of those that there are."""
        start, stop, step = bounds
        read = {one.attributes["tensor"] for one in ring.copies}
        self.arena.accesses(Access("shared", ring.start, ring.start + ring.nbytes, True),
                            *(Access(each, 0, 1, False) for each in read if self.program.tensor(each).output))
        for number in range(ahead):
            at = start + step * number if number else start
            stage = self.arena.address + (ring.start + number * ring.stage_bytes)
            if isinstance(at, Register): self._issue(op, ring, at, stage, at < stop)
            elif isinstance(stop, Register): self._issue(op, ring, at, stage, stop > at)
            elif at < stop: self._issue(op, ring, at, stage, None)
            else: self.kb.cp_async_commit()

    def _turn(self, stage: Register, ring: Stages, end: Register) -> None:
        """The next stage of the ring."""
        stage += ring.stage_bytes
        stage.set(self.kb.select(stage == end, end - ring.nbytes, stage, "u32"))

    def before(self, op: Op) -> bool:
        """Loads that have been copied ahead, or go to shared memory at once."""
        if op.name != "load_block": return False
        if op in self.bound:
            if op.result in self.assignment.staged: self.in_shared[op.result] = self.bound[op]
            else: self.put(op.result, to_registers(self, self.bound[op], self.assignment.layout(op.result),
                                                   op.result.shape))
            return True
        return self.stage(op)

    def after_op(self, op: Op) -> None: self.to_shared(op)
