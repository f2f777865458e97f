"""What a launch takes on a GPU: `Timing`, from the emulator's tapes.

Protocol. `Sample.of(...)` chooses the clusters whose warps are recorded: those that share the SMs of one cluster,
at a few places of the grid where there are several waves. The emulator runs them, without tensor arithmetic,
and `timed(...)` runs their SASS on a model of these SMs (job.py, csrc/sm.c), each place by itself.

    seconds = launch + cycles / clock       cycles of a grid: its clusters, in their order, each as long as those
                                            recorded nearest to it, on as many places as the GPU has at once

The rest of the GPU takes its share: an SM has its part of the rates of L2 and HBM. What must come from HBM is
what the clusters that run at once touch first (l2.py).
"""
from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from tinygrad_nv.ptx.assemble import Resources
from tinygrad_nv.ptx.emulator.tapes import Note, Tape
from tinygrad_nv.ptx.gpcs import most_clusters
from tinygrad_nv.ptx.timing.gpu import GPUFigures
from tinygrad_nv.ptx.timing.job import Code, code_of, made
from tinygrad_nv.ptx.timing.listing import Listing
from tinygrad_nv.ptx.timing.simulator import REASONS, Run, run
from tinygrad_nv.ptx.timing.units import Unit

REGISTERS_OF_SM, SHARED_OF_SM, THREADS_OF_SM, RESERVED_BYTES = 65536, 233472, 2048, 1024
UNCERTAINTY = 0.15          # of what is not fitted on any GPU: modelled, never measured
PLACES = 5                  # of a grid of several waves that are recorded
SHOWN = {Unit.TENSOR: "tensor cores", Unit.FMA: "FP32", Unit.ALU: "ALU", Unit.XU: "SFU",
         Unit.SHARED: "shared memory", Unit.COPY: "TMA"}


@dataclass(frozen=True)
class Shape:
    """A launch: extents, bytes of shared memory, and what ptxas says of the kernel."""
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    resources: Resources

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return prod(self.cluster)

    @property
    def clusters(self) -> int:
        """Clusters of the grid."""
        return prod(self.grid) // self.ctas

    def ctas_of_sm(self) -> int:
        """CTAs that an SM holds at once. Registers are given to warps by 256."""
        threads = -(-prod(self.block) // 32) * 32
        registers = -(-self.resources.registers * 32 // 256) * 256 * threads // 32
        return max(1, min(THREADS_OF_SM // threads, REGISTERS_OF_SM // max(registers, 1),
                          SHARED_OF_SM // (self.shared_bytes + RESERVED_BYTES), 32))

    def at_once(self, gpu: GPUFigures) -> int:
        """Clusters that the GPU holds at once."""
        return max(1, most_clusters(self.ctas, gpu.sms, self.ctas_of_sm()))


@dataclass(frozen=True)
class Wait:
    """Warp-cycles for which the recorded warps wait at one SASS instruction: `share` of all of theirs."""
    ptx_line: int
    sass: str
    reason: str
    share: float


@dataclass(frozen=True)
class Timing:
    """A prediction, never a measurement. `units`: busy shares of the recorded SMs, of L2 and of HBM, while the
    kernel runs; `limiter`: the busiest of them, "latency" where none is busy for half of the time. `unknown`:
    SASS instructions without figures."""
    gpu: str
    seconds: float
    uncertainty: float
    cycles: int
    clock_hz: float
    waves: float
    ctas_of_sm: int
    tflops: float
    units: Mapping[str, float]
    limiter: str
    waits: tuple[Wait, ...]
    unknown: tuple[str, ...] = ()
    runs: tuple[Run, ...] = field(default=(), repr=False)


def places(shape: Shape, gpu: GPUFigures) -> list[int]:
    """Numbers of the clusters at which recording begins: one where all run at once, else a few, evenly."""
    together = shape.ctas_of_sm()
    if shape.clusters <= shape.at_once(gpu): return [0]
    last = max(0, shape.clusters - together)
    return sorted({round(last * i / (PLACES - 1)) for i in range(PLACES)})


def timed(listing: Listing, entry: str, shape: Shape, tapes: Sequence[Tape], gpu: GPUFigures, flops: int,
          far: float = 0.0) -> Timing:
    """The prediction of tapes, `ctas_of_sm` clusters at each place."""
    code = code_of(listing, entry)
    by_place: dict[int, list[Tape]] = {}
    begins = places(shape, gpu)
    for tape in tapes:
        cluster = tape.cta // shape.ctas
        by_place.setdefault(max(at for at in begins if at <= cluster), []).append(tape)
    runs = {at: _run(code, some, shape, gpu, far) for at, some in sorted(by_place.items())}
    cycles = _makespan(shape, gpu, {at: one.cycles for at, one in runs.items()})
    seconds = gpu.launch_s + cycles / gpu.clock_hz
    units = _units(list(runs.values()))
    limiter = max(units, key=lambda name: units[name])
    return Timing(gpu.name, seconds, UNCERTAINTY, cycles, gpu.clock_hz, shape.clusters / shape.at_once(gpu),
                  shape.ctas_of_sm(), flops / seconds / 1e12, units,
                  limiter if units[limiter] >= 0.5 else "latency", _waits(code, list(runs.values())),
                  tuple(dict.fromkeys(each.opcode for each, cost in zip(code.instructions, code.costs, strict=True)
                                      if not cost.known)), tuple(runs.values()))


def _run(code: Code, tapes: Sequence[Tape], shape: Shape, gpu: GPUFigures, far: float) -> Run:
    """The clusters of one place. Rank r of each lies on SM r."""
    share = {i: np.where(np.isin(tape.notes["kind"], (Note.READS, Note.SECTORS)), far, 0.0)
             for i, tape in enumerate(tapes)}
    sms = [tape.cta % shape.ctas for tape in tapes]
    return run(made(code, tapes, gpu, share, sms), gpu)


def _makespan(shape: Shape, gpu: GPUFigures, known: Mapping[int, int]) -> int:
    """Cycles of all clusters on the places there are, begun in their order. `known`: cycles of the clusters
    that begin at a number, as many as an SM holds together."""
    at_once = shape.at_once(gpu)
    if shape.clusters <= at_once: return known[min(known)]
    numbers = sorted(known)
    ends = [0.0] * at_once
    lengths = np.interp(np.arange(shape.clusters), numbers, [known[number] for number in numbers])
    for length in lengths: heapq.heappush(ends, heapq.heappop(ends) + float(length))
    return round(max(ends))


def _units(runs: Sequence[Run]) -> dict[str, float]:
    cycles = sum(one.cycles for one in runs)
    sms = len(runs[0].busy)
    busy = sum(one.busy.sum(0) for one in runs)
    parts = {name: float(busy[unit]) / cycles / sms / (1 if unit in (Unit.SHARED, Unit.COPY) else 4)
             for unit, name in SHOWN.items()}
    issued = sum(int(one.waited[:, REASONS.index("issued")].sum()) for one in runs)
    parts["issue slots"] = issued / cycles / sms / 4
    parts["L2"] = sum(one.l2_busy for one in runs) / cycles / sms
    parts["HBM"] = sum(one.hbm_busy for one in runs) / cycles / sms
    return parts


def _waits(code: Code, runs: Sequence[Run], most: int = 12) -> tuple[Wait, ...]:
    waited = sum(one.waited for one in runs)
    total = max(1, int(waited.sum()))
    made_ = []
    for number in np.argsort(-waited[:len(code.instructions), 1:].max(1), kind="stable")[:most]:
        reason = 1 + int(waited[number, 1:].argmax())
        each = code.instructions[number]
        if waited[number, reason]:
            made_.append(Wait(int(code.lines[number]), each.opcode + each.modifiers, REASONS[reason],
                              float(waited[number, reason]) / total))
    return tuple(made_)
