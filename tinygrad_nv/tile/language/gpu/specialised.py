"""Warp specialisation, for sm_90a: a producer warp whose TMA fills the stages that the others multiply.

Protocol: where loops of a program multiply by wgmma, and TMA can bring all that they load for it
(produced.py), the kernel has four warps more. One thread of them goes through these loops alone, and those
around them, computes where loads begin, and copies; all others run the program as it is written
(consumer.py). A stage has a full and an empty barrier (tile/pipeline.py):

    producer                                        the program's warps
        ring.acquire(at)   waits for empty              ring.wait(at)      waits for full
        copies of the iteration                         what the body computes
        at.advance()                                    ring.release       of the stage, or, where products
                                                                           stay in flight, of the one before
                                                        at.advance()

A ring goes on from one run of its loop to the next: while the program's warps store what an outer iteration
has made, the next one's operands are on their way. Where a multiprocessor has room for one CTA, and there are
more programs than multiprocessors, whose loops are all as long, each CTA goes through programs itself, in
groups of GROUP along x, which share operands in L2.

Barriers of the program's warps count these alone. Registers that the producer does not need go to the others.
"""
from __future__ import annotations

import math
from collections.abc import Callable

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Value as Register
from tinygrad_nv.tile.lanes import Lanes, Number
from tinygrad_nv.tile.language.gpu.consumer import Consumer, Flight, Stages
from tinygrad_nv.tile.language.gpu.pipelines import Pipelines
from tinygrad_nv.tile.language.gpu.pipelining import Production, inner_loops
from tinygrad_nv.tile.language.gpu.registers import register_counts
from tinygrad_nv.tile.language.gpu.staged import ALIGN, SharedOperand, tile_in_smem
from tinygrad_nv.tile.language.ir import Op, Region, Value
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.layout import MAP_DTYPES, SharedTile
from tinygrad_nv.tile.pipeline import Pipeline

BARRIER = 1             # the named barrier of the program's warps
GROUP = 16              # programs along x that run side by side


class Specialised(Pipelines):
    """Programs with a producer."""
    def specialise(self, made: Production) -> None:
        """Shared memory, maps and barriers of the loops that a producer fills."""
        self.maps: list[MapArgument] = []
        self.waiting: list[Consumer] = []       # of the loops that are being written
        self.flights: dict[Op, Flight] = {}     # of the loops that have been
        self.filled: dict[Op, Stages] = {}
        self.ctas = made.ctas
        pending: list[tuple[Op, list[Op], list[SharedTile], int, Pipeline]] = []
        for op, loads in made.loops.items():
            depth, tiles = self.loop_plans[op].stages, [self._tile(one) for one in loads]
            nbytes = sum(-(-tile.nbytes // ALIGN) * ALIGN for tile in tiles)
            ring = Pipeline(self.kb, depth, sum(tile.nbytes for tile in tiles), self.assignment.warps,
                            name=f"full_and_empty{len(pending)}")
            pending.append((op, loads, tiles, nbytes, ring))
        if pending: self.arena.begin_after(self.kb.smem_bytes, BARRIER, 32 * self.assignment.warps)
        for op, loads, tiles, nbytes, ring in pending:
            places, at = dict[Op, SharedOperand](), 0
            for one, tile in zip(loads, tiles, strict=True):
                places[one] = SharedOperand(at, tile, one.result.dtype)
                at += -(-tile.nbytes // ALIGN) * ALIGN
            maps = {one: self._map(one, tile) for one, tile in zip(loads, tiles, strict=True)}
            again = bool(self.ctas) or op not in self.program.body.ops
            self.filled[op] = Stages(self.arena.take(nbytes * ring.depth, ALIGN), nbytes, places, maps, ring,
                                     again, inner_loops(op, made.loops))

    def _tile(self, op: Op) -> SharedTile:
        return tile_in_smem(*self.assignment.smem_extents(op.result), op.result.dtype)

    def _map(self, op: Op, tile: SharedTile) -> Register:
        """A tensor map over a load's tensor, with boxes of a column of its tile."""
        tensor, sizes = self.program.tensor(op.attributes["tensor"]), op.attributes["sizes"]
        size = tensor.dtype.itemsize
        box = [tile.rows if count else 1 for count in sizes[:-1]]
        self.maps.append(MapArgument(
            self.program.tensors.index(tensor), MAP_DTYPES[tensor.dtype], tensor.shape[::-1],
            tuple(stride * size for stride in tensor.strides[-2::-1]), (tile.span // size, *box[::-1]),
            f"{tile.span}B"))
        return self.kb.tensor_map(f"map{len(self.maps)}")

    # **** roles ****

    def with_producer(self) -> None:
        """The program in the warps that run it, the producer in the others."""
        kb, count = self.kb, 32 * self.assignment.warps
        with kb.if_(kb.tid.x == 0):
            for stages in self.filled.values(): stages.ring.init()
            kb.fence_mbarrier_init()
        kb.sync()
        few, many = register_counts(self.assignment.warps)
        with kb.if_(kb.tid.x >= count):
            if many: kb.setmaxnreg(few, more=False)
            with kb.if_(kb.tid.x == count):
                for stages in self.filled.values(): stages.at = stages.ring.cursor(producer=True)
                wanted = self._control_ops()
                self._programs(lambda: self._produce(self.program.body, wanted))
        with kb.else_():
            if many: kb.setmaxnreg(many, more=True)
            for stages in self.filled.values(): stages.at = stages.ring.cursor()
            self._programs(lambda: self.region(self.program.body))

    def _programs(self, write: Callable[[], None]) -> None:
        """One program, or those that the CTA goes through."""
        self.scopes.push()
        if not self.ctas: write()
        else:
            total, mark = math.prod(self.program.grid), self.arena.mark()
            with self.kb.loop(self.kb.ctaid.x.to("s32"), total, self.ctas, kind="s32") as number:
                self.numbers = self._place(number)
                write()
                self.arena.close(mark)
            self.numbers = None
        self.scopes.pop()

    def _place(self, number: Register) -> tuple[Number, Number, Number]:
        """x, y and z of a program by its number."""
        x, y, z = self.program.grid
        matrix, rest = (number // (x * y), number % (x * y)) if z > 1 else (0, number)
        if y == 1: return rest, 0, matrix
        if x == 1: return 0, rest, matrix
        if x % GROUP: return rest % x, rest // x, matrix
        inside = rest % (GROUP * y)
        return rest // (GROUP * y) * GROUP + inside % GROUP, inside // GROUP, matrix

    # **** the producer ****

    def _control_ops(self) -> set[Op]:
        """Operations that say where loops begin and end, which branch is taken, and where loads begin."""
        values: set[Value] = set()
        for op in self.program.body.walk():
            if op not in self.filled and not self._around(op): continue
            values |= set(op.operands[:3 if op.name == "for" else 1])
        for op, stages in self.filled.items():
            values |= {each
                       for one in (*stages.places, *self.ops_of_places(list(stages.places), op.regions[0]))
                       for each in one.operands}
        made: set[Op] = set()
        for op in reversed(list(self.program.body.walk())):
            if op.regions or not any(each in values for each in op.results): continue
            made.add(op)
            values |= set(op.operands)
        return made

    def _around(self, op: Op) -> bool:
        """Whether an operation has filled loops inside."""
        return bool(op.regions) and inner_loops(op, self.filled)

    def _produce(self, region: Region, wanted: set[Op]) -> None:
        """The copies of a region's loops, in their order."""
        for op in region.ops:
            if op.name == "for" and (op in self.filled or self._around(op)): self._fill(op, wanted)
            elif op.name == "if" and self._around(op): self._choose(op, wanted)
            elif op in wanted:
                self.alone = True
                getattr(self, f"do_{op.name}")(op)
                self.alone = False

    def _choose(self, op: Op, wanted: set[Op]) -> None:
        """The copies of a branch's sides."""
        test = self.scalar(op.operands[0]).register()
        for region, when in zip(op.regions, (self.kb.if_(test), self.kb.else_()), strict=True):
            with when:
                self.scopes.push()
                self._produce(region, wanted)
                self.scopes.pop()

    def _fill(self, op: Op, wanted: set[Op]) -> None:
        """The copies of a loop and of those inside."""
        start, stop, step = (self.number(each) for each in op.operands[:3])
        with self.kb.loop(start, stop, step, kind="s32") as i:
            if op in self.filled: self._copy(op, i)
            if not self._around(op): return
            self.scopes.push()
            self.put_scalar(op.regions[0].arguments[0], Lanes(self.kb, dtypes.int32, [i]))
            self._produce(op.regions[0], wanted)
            self.scopes.pop()

    def _copy(self, op: Op, i: Register) -> None:
        """The copies of an iteration."""
        stages = self.filled[op]
        at, first = stages.at, self.arena.address + stages.start
        places = self.starts(op, list(stages.places), i)
        full = stages.ring.acquire(at)
        stage = first + at.stage * stages.stage_bytes
        for one, operand in stages.places.items():
            tensor = self.program.tensor(one.attributes["tensor"])
            inner = operand.tile.span // tensor.dtype.itemsize
            column = operand.tile.rows * operand.tile.span
            for number in range(operand.tile.row_bytes // operand.tile.span):
                *outer, last = places[one]
                coordinates = [last + number * inner if number else last, *reversed(outer)]
                self.kb.tma_load(stage.at(operand.start + number * column), stages.maps[one],
                                 [int(each) if isinstance(each, float) else each for each in coordinates],
                                 full)
        at.advance()

    # **** the loops of the program's warps ****

    def do_for(self, op: Op) -> None:
        if op not in self.filled: return super().do_for(op)
        kb, region, stages = self.kb, op.regions[0], self.filled[op]
        start, stop, step = (self.number(each) for each in op.operands[:3])
        index, *arguments = region.arguments
        carried, sums = self.enter_loop(op)
        loop, outer = Consumer(self, op, stages, carried), self.bound
        self.flights[op] = loop.flight
        mark = self.arena.mark()
        with kb.loop(start, stop, step, kind="s32") as i:
            loop.begin(i + step < stop, i > start)
            self.bound = {**outer, **{one: place.at(loop.stage) for one, place in stages.places.items()}}
            self.waiting.append(loop)
            self._body(region, carried, arguments, (index, i))
            self.waiting.pop()
            self.bound = outer
            loop.end()
            self.arena.close(mark)
        loop.finish(start, stop)
        self.arena.leave(mark)
        if not stages.again: self.arena.take_back(stages.start, stages.stage_bytes * stages.ring.depth)
        return self.leave_loop(op, carried, sums)

    def before(self, op: Op) -> bool:
        for loop in self.waiting: loop.before_use(op)
        return super().before(op)
