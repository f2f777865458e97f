"""What a launch takes on a GPU: `Timing`, from the emulator's tapes.

Protocol. `places(...)` chooses the clusters whose warps are recorded: as many as share the SMs of one
cluster, at the beginning of the grid, and at a few places more where it has several waves. The emulator runs
them, without tensor arithmetic, and `timed(...)` runs their SASS on a model of these SMs (job.py, csrc/sm.c),
each place by itself.

    seconds = launch + cycles / clock       cycles of a grid: its clusters, in their order, as many at once as
                                            there is room for, each as long as those recorded nearest to it:
                                            what the second on an SM adds to the first, whose end it overlaps

The rest of the GPU takes its share: an SM has its part of the rates of L2 and HBM. What comes from HBM is
found from the first instructions of the other clusters that run at once (l2.py); the clock is what power
leaves (gpu.py). Nothing is fitted to kernels but what gpus/ says; `uncertainty` is an estimate.
"""
from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.ptx.assemble import Resources
from tinygrad_nv.ptx.emulator.tapes import Tape, Tapes
from tinygrad_nv.ptx.gpcs import most_clusters
from tinygrad_nv.ptx.timing.gpu import GPUFigures, figures, sustained_hz
from tinygrad_nv.ptx.timing.job import Code, Job, code_of, made
from tinygrad_nv.ptx.timing.l2 import far_shares
from tinygrad_nv.ptx.timing.listing import Listing, listing
from tinygrad_nv.ptx.timing.simulator import REASONS, Run, run
from tinygrad_nv.ptx.timing.units import Unit

REGISTERS_OF_SM, RESERVED_BYTES = 65536, 1024   # of each CTA the system has a KiB of shared memory
UNCERTAINTY = 0.15          # of what is not fitted on any GPU: modelled, never measured
BRIEF = 8000                # warp-instructions of a CTA of which only reads are kept: about a tile
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

    def busy_sms(self, gpu: GPUFigures) -> int:
        """SMs that have a CTA."""
        return min(gpu.sms, self.clusters * self.ctas)

    def ctas_of_sm(self, gpu: GPUFigures) -> int:
        """CTAs that an SM has at once: what it holds, or, of a grid that does not fill the GPU, its part, for
        CTAs go to the SMs in turn."""
        return max(1, min(self.room_of_sm(gpu), -(-self.clusters * self.ctas // gpu.sms)))

    def room_of_sm(self, gpu: GPUFigures) -> int:
        """CTAs that an SM holds at once. Registers are given to warps by 256."""
        threads = -(-prod(self.block) // 32) * 32
        registers = -(-self.resources.registers * 32 // 256) * 256 * threads // 32
        return max(1, min(gpu.threads_of_sm // threads, REGISTERS_OF_SM // max(registers, 1),
                          gpu.shared_bytes_of_sm // (self.shared_bytes + RESERVED_BYTES), 32))

    def at_once(self, gpu: GPUFigures) -> int:
        """Clusters that the GPU holds at once."""
        return max(1, most_clusters(self.ctas, gpu.sms, self.room_of_sm(gpu)))


@dataclass(frozen=True)
class Wait:
    """Warp-cycles for which the recorded warps wait at one SASS instruction: `share` of all of theirs."""
    ptx_line: int
    sass: str
    reason: str
    share: float


@dataclass(frozen=True)
class Timing:
    """A prediction, never a measurement. `units`: busy shares of the recorded SMs, of L2 and of HBM, while
    the kernel runs; `limiter`: the busiest of them, "latency" where none is busy for half of the time.
    `tflops` of tensor cores, `gbytes_per_s` between SMs and L2. `unknown`: SASS instructions without
    figures. `recorded`: what ran on the model, for chrome.py."""
    gpu: str
    seconds: float
    uncertainty: float
    cycles: int
    clock_hz: float
    waves: float
    ctas_of_sm: int
    tflops: float
    gbytes_per_s: float
    units: Mapping[str, float]
    limiter: str
    waits: tuple[Wait, ...]
    unknown: tuple[str, ...]
    code: Code = field(repr=False)
    recorded: tuple[tuple[Job, Run], ...] = field(repr=False)


def places(shape: Shape, gpu: GPUFigures) -> list[int]:
    """Numbers of the clusters at which recording begins: one where all run at once, else a few, evenly."""
    together = shape.ctas_of_sm(gpu)
    if shape.clusters <= shape.at_once(gpu): return [0]
    last = max(0, shape.clusters - 2 * together)
    return sorted({round(last * i / (PLACES - 1)) for i in range(PLACES)})


def recorded(shape: Shape, gpu: GPUFigures) -> list[int]:
    """All clusters that are recorded: at each place as many as an SM holds, and where there are several waves
    as many again, which follow them."""
    count = shape.ctas_of_sm(gpu) * (2 if shape.clusters > shape.at_once(gpu) else 1)
    return sorted({at + i for at in places(shape, gpu) for i in range(count) if at + i < shape.clusters})


def timed(code_list: Listing, entry: str, shape: Shape, tapes: Tapes, gpu: GPUFigures,
          memory: Sequence[tuple[int, int]], log: int = 0) -> Timing:
    """The prediction of the tapes of `recorded` clusters. `memory`: addresses and sizes of buffers; `log`:
    issues to keep of the first place."""
    code = code_of(code_list, entry, gpu)
    by_place: dict[int, list[Tape]] = {}
    begins = places(shape, gpu)
    ends = np.cumsum([len(tape.notes) for tape in tapes.warps])
    far = far_shares(tapes.reads, memory, np.concatenate([tape.notes for tape in tapes.warps]),
                     shape.clusters / len(tapes.clusters), gpu.l2_bytes)
    far_of = {id(tape): share for tape, share in zip(tapes.warps, np.split(far, ends[:-1]), strict=True)}
    for tape in tapes.warps:
        by_place.setdefault(max(at for at in begins if at <= tape.cluster), []).append(tape)
    jobs = {at: _job(code, some, shape, gpu, far_of) for at, some in sorted(by_place.items())}
    runs = {at: run(job, gpu, shape.busy_sms(gpu), log if at == begins[0] else 0) for at, job in jobs.items()}
    first = {at: _first(one, jobs[at]) for at, one in runs.items()}
    lengths = _every(shape, gpu, {at: one.cycles - first[at] or one.cycles for at, one in runs.items()})
    cycles = _makespan(lengths, shape.at_once(gpu))
    if shape.clusters > shape.at_once(gpu): cycles += max(0, round(first[0] - lengths[0]))
    units = _units(list(runs.values()))
    clock_hz = sustained_hz(gpu, units[SHOWN[Unit.TENSOR]], units["L2"])
    seconds = gpu.launch_s + cycles / clock_hz
    together = shape.ctas_of_sm(gpu)
    flops, nbytes = (sum(_every(shape, gpu, {at: work(code, job) / job.ctas * shape.ctas
                                             for at, job in jobs.items()}))
                     for work in (_flops, _bytes))
    limiter = max(units, key=lambda name: units[name])
    return Timing(gpu.name, seconds, UNCERTAINTY, cycles, clock_hz, shape.clusters / shape.at_once(gpu),
                  together, flops / seconds / 1e12, nbytes / seconds / 1e9, units,
                  limiter if units[limiter] >= 0.5 else "latency", _waits(code, list(runs.values())),
                  code.unknown, code, ((jobs[begins[0]], runs[begins[0]]),))


def _job(code: Code, tapes: Sequence[Tape], shape: Shape, gpu: GPUFigures,
         far: Mapping[int, np.ndarray]) -> Job:
    """The clusters of one place. Rank r of each lies on SM r."""
    share = {i: far[id(tape)] for i, tape in enumerate(tapes)}
    return made(code, tapes, gpu, share, [tape.rank for tape in tapes], shape.ctas_of_sm(gpu))


def _first(one: Run, job: Job) -> int:
    """When the last of those that began at once ended; 0 where all did."""
    began = job.warps["after"] < 0
    return 0 if began.all() else int(one.ends[began].max())


def _flops(code: Code, job: Job) -> int:
    per = np.array([*(each.tensor_flops for each in code.instructions), 0], np.int64)
    return int(per[job.steps["instr"]].sum())


def _bytes(_: Code, job: Job) -> int: return int(job.effects["bytes"].sum(dtype=np.int64))


def _every(shape: Shape, gpu: GPUFigures, known: Mapping[int, float]) -> list[float]:
    """A figure of each cluster, from those of the recorded ones around it."""
    if shape.clusters <= shape.at_once(gpu): return [known[min(known)]] * shape.clusters
    numbers = sorted(known)
    found = np.interp(np.arange(shape.clusters), numbers, [known[number] for number in numbers])
    return [float(each) for each in found]


def _makespan(lengths: Sequence[float], at_once: int) -> int:
    """Cycles until all have ended, begun in their order wherever there is room."""
    ends = [0.0] * at_once
    for length in lengths: heapq.heappush(ends, heapq.heappop(ends) + length)
    return round(max(ends))


def _units(runs: Sequence[Run]) -> dict[str, float]:
    cycles = sum(one.cycles for one in runs)
    sms = len(runs[0].busy)
    busy = np.sum([one.busy.sum(0) for one in runs], 0)
    parts = {name: float(busy[unit]) / cycles / sms / (1 if unit in (Unit.SHARED, Unit.COPY) else 4)
             for unit, name in SHOWN.items()}
    issued = sum(int(one.waited[:, REASONS.index("issued")].sum()) for one in runs)
    parts["issue slots"] = issued / cycles / sms / 4
    parts["L2"] = sum(one.l2_busy for one in runs) / cycles / sms
    parts["HBM"] = sum(one.hbm_busy for one in runs) / cycles / sms
    return parts


def _waits(code: Code, runs: Sequence[Run], most: int = 12) -> tuple[Wait, ...]:
    waited = np.sum([one.waited for one in runs], 0)
    total = max(1, int(waited.sum()))
    found = []
    for number in np.argsort(-waited[:len(code.instructions), 1:].max(1), kind="stable")[:most]:
        reason = 1 + int(waited[number, 1:].argmax())
        each = code.instructions[number]
        if waited[number, reason]:
            found.append(Wait(int(code.lines[number]), each.opcode + each.modifiers, REASONS[reason],
                              float(waited[number, reason]) / total))
    return tuple(found)


# **** launches ****

def predicted(text: str, arch: str, entry: str, shape: Callable[[Resources], Shape], name: str,
              record: Callable[[Tapes], None], memory: Sequence[tuple[int, int]], log: int = 0) -> Timing:
    """A launch of an entry function on the GPU `name`. `record` runs chosen clusters on the emulator,
    `memory` has the addresses and sizes of its buffers. Raises `ConfigError` for a GPU without figures, or of
    another architecture, `ToolchainError` without ptxas or a disassembler."""
    gpu = figures(name)
    if arch[:5] != gpu.arch[:5]:
        raise ConfigError(f"{name} is of {gpu.arch}, the emulator of {arch}", f"an emulator of {gpu.arch}",
                          "choose another GPU, or another architecture")
    code = listing(text, gpu.arch)
    found = shape(code.resources[entry])
    at_once = range(min(found.clusters, found.at_once(gpu)))
    tapes = Tapes(recorded(found, gpu), idle=True, others=at_once, brief=BRIEF * found.ctas)
    record(tapes)
    return timed(code, entry, found, tapes, gpu, memory, log)


def as_text(timing: Timing) -> str:
    """A table for a reader."""
    rows = [("predicted, not measured", f"{timing.seconds * 1e6:,.1f} us ± {timing.uncertainty:.0%}"),
            ("GPU", f"{timing.gpu}, {timing.clock_hz / 1e9:.3f} GHz"), ("cycles", f"{timing.cycles:,}"),
            ("waves", f"{timing.waves:.2f}, {timing.ctas_of_sm} CTAs an SM"),
            ("tensor cores", f"{timing.tflops:,.1f} TFLOP/s"),
            ("SMs and L2", f"{timing.gbytes_per_s:,.0f} GB/s"),
            ("limiter", timing.limiter)]
    lines = [f"{name:<24}{value:>28}" for name, value in rows]
    lines += ["", *(f"{name:<24}{share:>28.1%}" for name, share in
                    sorted(timing.units.items(), key=lambda each: -each[1]))]
    lines += ["", f"{'line':>6} {'share':>7}  {'waits for':<10} SASS"]
    lines += [f"{each.ptx_line:>6} {each.share:>7.1%}  {each.reason:<10} {each.sass}"
              for each in timing.waits]
    if timing.unknown: lines += ["", "without figures, taken for 20 cycles: " + ", ".join(timing.unknown)]
    return "\n".join(lines)


def as_json(timing: Timing) -> dict[str, object]:
    """The same for a program."""
    plain = {name: value for name, value in vars(timing).items() if name not in ("code", "recorded")}
    return plain | {"units": dict(timing.units), "waits": [vars(each) for each in timing.waits]}
