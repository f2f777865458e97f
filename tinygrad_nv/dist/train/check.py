"""Whether a pipeline schedule can run, how long it takes, and how many microbatches it keeps.

Protocol. `check(schedule, costs)` runs a schedule on paper. Each rank runs its `Op`s in order; F waits for
F of the stage before, B for B of the stage behind and for F of its own, W for its B. It raises `DistError`
for a schedule that lacks an `Op`, has one twice or on another rank, or in which ranks wait for each other.
Times are in the unit of `costs`; transfers between ranks take no time.

`bubble` is the fraction of time that ranks wait. For p ranks, m microbatches, v chunks and passes that take
f, b and w it should be (sources in schedules.py), with T = f + b + w:

    GPipe, 1F1B     (p - 1) / (m + p - 1)
    interleaved     (p - 1) / (v m + p - 1)
    ZB-H1           (p - 1) d / (m T + (p - 1) d), with d = b + max(f - w, 0)
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tinygrad_nv.dist.train.schedules import Kind, Op, Schedule
from tinygrad_nv.errors import DistError

Costs = Mapping[Kind, float]
EVEN: Costs = {"F": 1.0, "B": 1.0, "W": 1.0}


@dataclass(frozen=True)
class Report:
    """`kept` has for each rank the most microbatches that it has begun and not ended, over its stages."""
    makespan: float
    bubble: float
    kept: tuple[int, ...]
    begins: Mapping[Op, float]
    ends: Mapping[Op, float]

    def __str__(self) -> str:
        return (f"{self.makespan:g} long, {self.bubble:.1%} of it waiting, keeps "
                f"{', '.join(map(str, self.kept))} microbatches")


def check(schedule: Schedule, costs: Costs = EVEN) -> Report:
    """Runs a schedule on paper. `costs` are those of a stage; B of a schedule that does not split takes B and
    W. Raises `DistError`."""
    _check_complete(schedule)
    begins, ends = dict[Op, float](), dict[Op, float]()
    at, clock = [0] * len(schedule.ranks), [0.0] * len(schedule.ranks)
    while True:
        moved = False
        for rank, ops in enumerate(schedule.ranks):
            while at[rank] < len(ops) and all(one in ends for one in needs(schedule, ops[at[rank]])):
                op = ops[at[rank]]
                begins[op] = max([clock[rank], *(ends[one] for one in needs(schedule, op))])
                clock[rank] = ends[op] = begins[op] + cost_of(schedule, op, costs)
                at[rank] += 1
                moved = True
        if not moved: break
    stuck = [(rank, ops[at[rank]]) for rank, ops in enumerate(schedule.ranks) if at[rank] < len(ops)]
    if stuck: raise _deadlock(schedule, stuck, ends)
    busy = sum(cost_of(schedule, op, costs) for ops in schedule.ranks for op in ops)
    makespan = max(clock)
    return Report(makespan, 1 - busy / (makespan * len(schedule.ranks)), most_kept(schedule), begins, ends)


def cost_of(schedule: Schedule, op: Op, costs: Costs) -> float:
    """How long a pass takes."""
    return costs["B"] + costs["W"] if op.kind == "B" and not schedule.splits else costs[op.kind]


def needs(schedule: Schedule, op: Op) -> list[Op]:
    """Returns the operations that an `Op` waits for."""
    if op.kind == "W": return [Op("B", op.stage, op.microbatch)]
    if op.kind == "F": return [Op("F", op.stage - 1, op.microbatch)] if op.stage else []
    own = Op("F", op.stage, op.microbatch)
    return [own, Op("B", op.stage + 1, op.microbatch)] if op.stage + 1 < schedule.stages else [own]


def most_kept(schedule: Schedule) -> tuple[int, ...]:
    """Microbatches that each rank has in memory at most: from F to the last pass that needs its input."""
    last, made = "W" if schedule.splits else "B", list[int]()
    for ops in schedule.ranks:
        now, most = 0, 0
        for op in ops:
            now += (op.kind == "F") - (op.kind == last)
            most = max(most, now + (op.kind == last))
        made.append(most)
    return tuple(made)


def _check_complete(schedule: Schedule) -> None:
    for rank, ops in enumerate(schedule.ranks):
        wanted = Counter(Op(kind, stage, m) for kind in ("F", "B", *(("W",) if schedule.splits else ()))
                         for stage in range(rank, schedule.stages, len(schedule.ranks))
                         for m in range(schedule.microbatches))
        found = Counter(ops)
        if extra := found - wanted:
            raise DistError(f"rank {rank} of schedule {schedule.name} runs {next(iter(extra))}",
                            "each pass once, on the rank that has its stage")
        if missing := wanted - found:
            raise DistError(f"rank {rank} of schedule {schedule.name} does not run {next(iter(missing))}",
                            "each pass of each microbatch")


def _deadlock(schedule: Schedule, stuck: list[tuple[int, Op]], ends: Mapping[Op, float]) -> DistError:
    lines = [f"rank {rank} waits at {op} for {next(one for one in needs(schedule, op) if one not in ends)}"
             for rank, op in stuck]
    return DistError(f"schedule {schedule.name} does not end:\n  " + "\n  ".join(lines),
                     "passes in an order in which each finds what it needs",
                     "put what is waited for before what waits")
