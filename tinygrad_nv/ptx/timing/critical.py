"""The critical path of a launch: which cycles, made fewer, make it shorter.

Protocol: a run of csrc/sm.c has the moments that followed each other from the first issue to the last
(`Run.path`). `parts(...)` sums the cycles between them by what took them: a rate of the GPU, a latency, the
warps' own order. That is the derivative of the time by each of them: a tensor core twice as fast takes half
of its part away, until something else is critical. `links(...)` has the instructions in the middle half of
the path, which lies in the steady state of a main loop. `uncertainty(...)` weighs what is not known exactly
of a GPU by the parts it has: errors of figures are independent, so their squares add up.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from tinygrad_nv.ptx.timing.job import Code, Job
from tinygrad_nv.ptx.timing.simulator import Cause, Run

LAUNCH_SPREAD = 0.5     # of launch_s
UNKNOWN_SPREAD = 0.5    # of what follows instructions without a known cost


@dataclass(frozen=True)
class Part:
    """Share of the cycles: its name, what makes them fewer, and how much they may be off, one standard
    deviation: small where a rate is published and agreed on, large where gpus/ says \"assumed\"."""
    name: str
    spread: float
    advice: str


PARTS = {
    Cause.BEGINS: Part("CTAs that begin", 0.5, "fewer, persistent CTAs"),
    Cause.IN_ORDER: Part("dependent instructions", 0.05, "independent instructions, more warps"),
    Cause.ISSUE_SLOT: Part("issue slots", 0.05, "fewer instructions, wider ones"),
    Cause.PIPE: Part("FP32, ALU, SFU", 0.05, "fewer of these operations"),
    Cause.RESULT: Part("results of units", 0.2, "independent instructions between, more warps"),
    Cause.TENSOR_RATE: Part("tensor cores", 0.03, "fewer multiply-adds: skipped tiles, 8-bit operands"),
    Cause.TENSOR_LATENCY: Part("latency of tensor cores", 0.1, "more wgmmas a group, a second warpgroup"),
    Cause.SHARED_RATE: Part("shared memory", 0.05, "no bank conflicts, operands in registers, larger tiles"),
    Cause.SHARED_LATENCY: Part("latency of shared memory", 0.1, "loads ahead of their use"),
    Cause.L2_RATE: Part("L2", 0.15, "larger tiles, multicast"),
    Cause.HBM_RATE: Part("HBM", 0.1, "fewer bytes: smaller types, an order of tiles that L2 keeps"),
    Cause.COPY_RATE: Part("issue of TMA", 0.3, "larger boxes"),
    Cause.MEMORY_LATENCY: Part("latency of memory", 0.2, "more stages, more bytes in flight"),
    Cause.SYNC: Part("barriers", 0.3, "fewer barriers, more stages")}


@dataclass(frozen=True)
class Link:
    """An instruction on the critical path: `share` of the cycles in its middle half, by `cause`."""
    ptx_line: int
    sass: str
    cause: str
    share: float


def parts(runs: Sequence[Run]) -> dict[Cause, float]:
    """Shares of all cycles. Those of wgmma may be a little below 0 elsewhere: an instruction may be issued
    before the one it follows has ended, as tensor cores take some of them ahead."""
    rows = np.concatenate([run.path for run in runs])
    cycles = np.bincount(rows[:, 3], rows[:, 2] - rows[:, 1], len(Cause))
    whole = max(1.0, float(cycles.sum()))
    return {cause: float(cycles[cause]) / whole for cause in Cause}


def links(code: Code, recorded: Sequence[tuple[Job, Run]], most: int = 8) -> tuple[Link, ...]:
    """The instructions with most cycles in the middle half of the paths."""
    table = np.zeros((len(code.instructions) + 1, len(Cause)))
    for job, run in recorded:
        first, last = run.cycles // 4, run.cycles - run.cycles // 4
        cycles = np.minimum(run.path[:, 2], last) - np.maximum(run.path[:, 1], first)
        inside = (run.path[:, 1] < last) & (run.path[:, 2] > first)
        np.add.at(table, (job.steps["instr"][run.path[inside, 0]], run.path[inside, 3]), cycles[inside])
    whole, flat = max(1.0, table.sum()), table[:-1].ravel()
    found = []
    for at in np.argsort(-flat, kind="stable")[:most]:
        number, cause = divmod(int(at), len(Cause))
        if flat[at] <= 0: break
        each = code.instructions[number]
        found.append(Link(int(code.lines[number]), each.opcode + each.modifiers, PARTS[Cause(cause)].name,
                          float(flat[at] / whole)))
    return tuple(found)


def unknown_share(code: Code, recorded: Sequence[tuple[Job, Run]]) -> float:
    """Returns the share of the cycles of the critical path that instructions without a known cost take, and
    what follows them."""
    known = np.array([*(cost.known for cost in code.costs), True])
    cycles, whole = 0, 1
    for job, run in recorded:
        lengths = run.path[:, 2] - run.path[:, 1]
        default = ~known[job.steps["instr"][run.path[:, 0]]]
        default[1:] |= default[:-1].copy()
        cycles += int(lengths[default].sum())
        whole += int(lengths.sum())
    return cycles / whole


def uncertainty(path: Mapping[Cause, float], model: float, launch: float, unknown: float) -> float:
    """Returns one standard deviation of the seconds. `model`: what kernels that judge the model are off;
    `launch`: the share that launching takes; `unknown`: of the cycles, those of instructions without a known
    cost."""
    terms = [(1 - launch) * share * PARTS[cause].spread for cause, share in path.items()]
    terms += [launch * LAUNCH_SPREAD, (1 - launch) * model, (1 - launch) * unknown * UNKNOWN_SPREAD]
    return sqrt(sum(term * term for term in terms))


