"""The pass that says of each loop what it loads ahead, by whom, and how far.

Protocol: `list_attempts(program, …)` has what may be tried, the best first: the stages of loops that say how
far ahead they may begin, as far as there is room, and whether CTAs go through programs. Of each, `loops` has
a `LoopPlan` for every loop that loads operands of dots ahead: by TMA, of a producer warp (specialised.py), or
by cp.async (pipelines.py). What fits is known once the kernel is written.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tinygrad_nv.tile.language.gpu.assign import Assignment
from tinygrad_nv.tile.language.gpu.dots import FP8, source_of
from tinygrad_nv.tile.language.gpu.layout import extents
from tinygrad_nv.tile.language.ir import STORES, Op, Program, Value
from tinygrad_nv.tile.language.ranges import Ranges

LEAST_IN_FLIGHT = 3     # stages, beyond which products stay in flight: else too few copies are on their way
SCALARS = ("constant", "apply", "cast", "bitcast", "program_id")


@dataclass(frozen=True)
class Depth:
    """Stages of loops: the schedule's, and at most so many of a loop that says how far ahead it may begin."""
    schedule: int
    most: int

    def of(self, op: Op) -> int:
        """Stages of a loop: of its pipes, else those that it begins ahead and the one that it reads, or the
        schedule's."""
        if "pipe" in op.attributes: return int(op.attributes["pipe"])
        ahead: int = op.attributes["stages"]
        return min(ahead + 1, self.most) if ahead else self.schedule


@dataclass(frozen=True)
class Production:
    """The loops that a producer fills, with their loads; stages of those that have others inside; and how
    many CTAs go through the programs, 0 where each is one's own."""
    loops: dict[Op, list[Op]]
    outer: int = 2
    ctas: int = 0


@dataclass(frozen=True, eq=False)
class LoopPlan:
    """Loads of a loop that go to `stages` in shared memory. Of loops with cp.async, copies begin `ahead`
    iterations before, and products of the dots `flying` stay in flight until those of the next are issued."""
    loads: Sequence[Op]
    by: Literal["TMA", "cp.async"]
    stages: int
    ahead: int
    flying: Sequence[Op] = ()


@dataclass(frozen=True, eq=False)
class Attempt:
    """Stages and roles that a kernel may be written with."""
    depth: Depth
    production: Production
    loops: Mapping[Op, LoopPlan] = field(default_factory=dict)


def list_attempts(program: Program, assignment: Assignment, loops: dict[Op, list[Op]], depth: int,
                  sm_count: int) -> list[Attempt]:
    """Stages at most of loops that say how far ahead they may begin, which is as far as there is room; the
    schedule's are as it says. Of each, CTAs that go through programs first, and two stages around loops."""
    every = [op for op in program.body.walk() if op.name == "for"]
    ahead = max((op.attributes["stages"] for op in every if "pipe" not in op.attributes), default=0)
    nested = any(inner_loops(op, loops) for op in loops)
    ctas = sm_count if loops and sm_count < math.prod(program.grid) and _alike(program, loops) else 0
    loads = {op: found for op in every if op not in loops and (found := ahead_of(op, assignment))}
    flying = {op: in_flight(op, assignment) for op in loads}
    needed = {op: [one for one in found if one.result in assignment.staged] for op, found in loops.items()}
    made = []
    for most in range(ahead + 1, 0, -1) if ahead else (1,):
        for outer in (2, 1) if nested else (1,):
            stages = Depth(depth, most)
            plans = {op: _by_tma(op, needed, stages, outer) for op in loops}
            plans.update({op: _by_threads(stages.of(op), found, flying[op]) for op, found in loads.items()
                          if stages.of(op) >= 2})
            ample = {op: replace(plan, loads=loops.get(op, plan.loads)) for op, plan in plans.items()}
            made += [Attempt(stages, Production(some, outer, count), each)
                     for some, each in [(loops, ample)] * (loops != needed) + [(needed, plans)]
                     for count in ([ctas, 0] if ctas else [0])]
    return made


def _by_tma(op: Op, loops: dict[Op, list[Op]], depth: Depth, outer: int) -> LoopPlan:
    stages = min(depth.of(op), outer) if inner_loops(op, loops) else depth.of(op)
    return LoopPlan(loops[op], "TMA", stages, stages)


def _by_threads(stages: int, loads: Sequence[Op], flying: Sequence[Op]) -> LoopPlan:
    if stages <= LEAST_IN_FLIGHT: flying = ()
    return LoopPlan(loads, "cp.async", stages, stages - 2 if flying else stages - 1, flying)


def _alike(program: Program, loops: dict[Op, list[Op]]) -> bool:
    """Whether loops are as long in all programs."""
    ranges = Ranges(program)
    bounds = [ranges.of(each) for op in loops for each in op.operands[:2]]
    return all(each.low == each.high for each in bounds)


def inner_loops(op: Op, loops: Mapping[Op, object]) -> bool:
    """Whether some of the loops are inside of an operation."""
    return any(each in loops for region in op.regions for each in region.walk())


def ahead_of(op: Op, assignment: Assignment) -> list[Op]:
    """Loads of a loop for dots alone, whose places follow from its index, of tensors that it does not
    write."""
    return [one for one in _foreseen(op, assignment) if one.result in assignment.staged]


def read_ahead(op: Op, assignment: Assignment) -> list[Op]:
    """Such loads for registers, of whole rows: of them TMA can make what threads would load themselves."""
    return [one for one in _foreseen(op, assignment)
            if one.result not in assignment.roles and 0 < len(one.result.shape) <= 2
            and one.attributes["sizes"][-1] > 0 and one.attributes["other"] == 0
            and extents(one.result.shape).exact]


def _foreseen(op: Op, assignment: Assignment) -> list[Op]:
    """Loads of blocks whose places follow from a loop's index, of tensors that it does not write."""
    region = op.regions[0]
    written = {one.attributes["tensor"] for one in region.walk() if one.name in STORES}
    made = {each: one for one in region.ops for each in one.results}

    def follows(value: Value) -> bool:
        if value not in made: return value not in region.arguments[1:]
        return can_recompute(made[value], assignment.program) and all(map(follows, made[value].operands))
    return [one for one in region.ops if one.name == "load_block"
            and one.attributes["tensor"] not in written and all(map(follows, one.operands))]


def can_recompute(op: Op, program: Program) -> bool:
    """Whether an operation may be computed again, ahead of its place: a scalar, of memory only where the
    program does not write."""
    if op.name in ("load", "load_block"):
        return not op.result.shape and not program.tensor(op.attributes["tensor"]).output
    return op.name in SCALARS and not op.result.shape


def in_flight(op: Op, assignment: Assignment) -> list[Op]:
    """Dots of a loop whose products may stay in flight: by wgmma, added to what the loop carries, of which
    nothing else of the body knows; empty where there are others, too."""
    region = op.regions[0]
    dots = [one for one in region.walk() if one.name == "dot" and assignment.plans[one].kind == "wgmma"]
    staged = all(source_of(each, assignment.makers)[0] in assignment.staged
                 for one in dots for each in one.operands[:2])
    return dots if staged and all(adds_alone(one, op, assignment.uses) for one in dots) else []


def adds_alone(dot: Op, op: Op, uses: Mapping[Value, list[Op]]) -> bool:
    """Whether a dot adds to what a loop carries, of which nothing else of the body knows."""
    region, total = op.regions[0], dot.operands[2]
    if total not in region.arguments or dot not in region.ops: return False
    if dot.operands[0].dtype in FP8: return False
    place = region.arguments.index(total) - 1
    return region.yields[place] is dot.result and uses[total] == [dot] and uses[dot.result] == [op]
