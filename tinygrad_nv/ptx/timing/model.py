"""Time of a launch on a GPU: `Timing`, from the emulator's tapes.

Protocol. Chosen clusters are recorded (shape.py): the emulator runs them, without tensor arithmetic, and
`timed(...)` runs their SASS on a model of these SMs (job.py, csrc/sm.c), each place by itself.

    seconds = launch + cycles / clock       cycles of a grid: its clusters in their order, each where there is
                                            room first. Those that begin together take what they take; each
                                            further one what those recorded nearest to it add on their SM

The rest of the GPU takes its share: an SM has its part of the rates of L2 and HBM. What comes from HBM is
found from the first instructions of the other clusters that run at once (l2.py); the clock is what power
leaves (gpu.py). Nothing is fitted to kernels but what gpus/ says; `uncertainty` follows from how well the
figures are known that the critical path depends on (critical.py).
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import mean

import numpy as np

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.ptx.assemble import Resources
from tinygrad_nv.ptx.emulator.tapes import Tape, Tapes
from tinygrad_nv.ptx.timing import critical
from tinygrad_nv.ptx.timing.drawn import deal, find_drawn_tiles, lengths, makespan, row_of
from tinygrad_nv.ptx.timing.gpu import GPUFigures, clock_under_load, figures, slow_down
from tinygrad_nv.ptx.timing.job import Code, Job, as_given, code_of, make_job
from tinygrad_nv.ptx.timing.l2 import read_bytes, shares_of
from tinygrad_nv.ptx.timing.recording import WHOLE, Recording, counted, differ, record_launch
from tinygrad_nv.ptx.timing.shape import Shape, clusters_to_record
from tinygrad_nv.ptx.timing.simulator import REASONS, Cause, Run, run
from tinygrad_nv.ptx.timing.units import Unit

RATES_MATTER = 0.01         # of the critical path: the share of L2 and HBM from which on their clocks matter
SHOWN = {Unit.TENSOR: "tensor cores", Unit.FMA: "FP32", Unit.ALU: "ALU", Unit.XU: "SFU",
         Unit.SHARED: "shared memory", Unit.COPY: "TMA"}


@dataclass(frozen=True)
class Wait:
    """Warp-cycles for which the recorded warps wait at one SASS instruction: `share` of all of theirs."""
    ptx_line: int
    sass: str
    reason: str
    share: float


@dataclass(frozen=True)
class Timing:
    """A prediction, never a measurement. `uncertainty`: one standard deviation, of the seconds. `units`: busy
    shares of the recorded SMs, of L2 and of HBM, while the kernel runs; `limiter`: the busiest of them,
    "latency" where none is busy for half of the time. `path`: shares of the critical path by what takes them,
    `links`: instructions of its steady state (critical.py); `idle`: the share of the SMs' time without
    a CTA. `tflops` of tensor cores, `gbytes_per_s` between SMs and L2. `unknown`: SASS instructions
    without figures. `clusters_to_record`: what ran on the model, for chrome.py."""
    gpu: str
    seconds: float
    uncertainty: float
    cycles: int
    clock_hz: float
    waves: float
    idle: float
    ctas_of_sm: int
    tflops: float
    gbytes_per_s: float
    units: Mapping[str, float]
    limiter: str
    path: Mapping[str, float]
    links: tuple[critical.Link, ...]
    waits: tuple[Wait, ...]
    unknown: tuple[str, ...]
    shape: Shape = field(repr=False)
    code: Code = field(repr=False)
    recorded: tuple[tuple[Job, Run], ...] = field(repr=False)


def predict_recording(recording: Recording, gpu: GPUFigures, log: int = 0) -> Timing:
    """Returns the prediction of a launch that was recorded; `log`: issues to keep of the first place."""
    code, more = code_of(recording.listing, recording.entry, gpu), 1.0
    shape, tapes, begins = recording.shape, recording.tapes, recording.begins
    sms = float(shape.busy_sms(gpu))
    if shape.clusters <= shape.at_once(gpu):
        if tapes.draws: begins, more = _typical(shape, gpu, tapes, begins)
        else: sms = _sharing_sms(recording, gpu)
    jobs = _jobs(code, recording, gpu, begins)
    code = as_given(code, recording.listing.origins)
    found = _predict_jobs(code, shape, gpu, jobs, more, sms, log)
    if found.clock_hz == gpu.clock_hz or found.path["L2"] + found.path["HBM"] < RATES_MATTER: return found
    return _predict_jobs(code, shape, slow_down(gpu, found.clock_hz), jobs, more, sms, log)


def _sharing_sms(recording: Recording, gpu: GPUFigures) -> float:
    """Returns how many SMs as busy as the recorded ones share L2 and HBM, of a grid that runs at once. The
    first have the most CTAs, and their CTAs the most tiles: the others move less, or are done sooner."""
    shape, warps = recording.shape, recording.tapes.warps
    sms = min(shape.busy_sms(gpu), shape.clusters * shape.ctas / shape.ctas_of_sm(gpu))
    clusters = len({tape.cluster for tape in warps})
    if sum(len(tape.sources) for tape in counted(recording.tapes)) > WHOLE * shape.ctas * clusters: return sms
    mine = sum(int(read_bytes(tape.notes).sum()) for tape in warps) / clusters
    mean_of_all = recording.reads.nbytes / shape.clusters
    return sms * min(1.0, mean_of_all / mine) if mine and mean_of_all else sms


def _predict_jobs(code: Code, shape: Shape, gpu: GPUFigures, jobs: Mapping[int, Job], more: float,
                  sms: float, log: int) -> Timing:
    """Returns the prediction of what runs at each place; the grid takes `more` times as long, and as much of
    L2 and HBM as `sms` SMs like the recorded ones."""
    begin = min(jobs)
    runs = {at: run(job, gpu, sms, log if at == begin else 0) for at, job in jobs.items()}
    both = [(jobs[at], runs[at]) for at in jobs]
    cycles, idle = _uneven(shape, gpu, jobs, runs) or _cycles(shape, gpu, jobs, runs)
    units, path = _units(list(runs.values())), critical.parts(list(runs.values()))
    # where the last clusters run, the SMs that are done leave them their parts of L2 and HBM
    if shape.clusters > shape.at_once(gpu):
        cycles = round(cycles * (1 - idle * (path[Cause.L2_RATE] + path[Cause.HBM_RATE])))
    over = _drain_factor(_moving(shape, gpu, jobs, runs, cycles), path)
    cycles = ceil(cycles * more * over)
    units = {name: min(1.0, share / over) for name, share in units.items()}
    clock_hz = clock_under_load(gpu, units[SHOWN[Unit.TENSOR]], units["L2"], units["HBM"])
    seconds = gpu.launch_s + cycles / clock_hz
    flops, nbytes = (more * _whole(shape, gpu, code, jobs, work) for work in (_flops, _bytes))
    limiter = max(units, key=lambda name: units[name])
    spread = critical.uncertainty(path, gpu.model_spread, gpu.launch_s / seconds,
                                  critical.unknown_share(code, both))
    return Timing(gpu.name, seconds, spread, cycles, clock_hz, shape.clusters / shape.at_once(gpu), idle,
                  shape.ctas_of_sm(gpu), flops / seconds / 1e12, nbytes / seconds / 1e9, units,
                  limiter if units[limiter] >= 0.5 else "latency",
                  {critical.PARTS[cause].name: share for cause, share in path.items()},
                  critical.links(code, both), _waits(code, list(runs.values())), code.unknown, shape, code,
                  (both[0],))


def _typical(shape: Shape, gpu: GPUFigures, tapes: Tapes,
             begins: Sequence[int]) -> tuple[list[int], float]:
    """Returns, of places whose clusters draw their work tiles, the one that executed about as much as all do
    in the mean, and how much longer the grid takes than it."""
    tiles = find_drawn_tiles(tapes.warps)
    executed = {at: steps for at in begins if (steps := tiles.whole(clusters_to_record(shape, gpu, [at])))}
    if not executed: return list(begins[:1]), 1.0
    whole = mean(executed.values())
    chosen = min(executed, key=lambda at: abs(executed[at] - whole))
    return [chosen], makespan(tiles, shape.clusters) / executed[chosen]


def _jobs(code: Code, recording: Recording, gpu: GPUFigures, begins: Sequence[int]) -> dict[int, Job]:
    """Returns what runs at each place. Rank r of each of its clusters lies on SM r."""
    shape, tapes = recording.shape, recording.tapes
    chosen = set(clusters_to_record(shape, gpu, begins))
    warps = [tape for tape in tapes.warps if tape.cluster in chosen]
    notes = np.concatenate([tape.notes for tape in warps])
    shares = shares_of(recording.reads.first, recording.memory, notes,
                       shape.clusters / len({tape.cluster for tape in warps}), shape.ctas_of_sm(gpu), gpu)
    ends = np.cumsum([len(tape.notes) for tape in warps])
    by_place: dict[int, list[tuple[Tape, np.ndarray]]] = {}
    for tape, share in zip(warps, np.split(shares, ends[:-1]), strict=True):
        by_place.setdefault(max(at for at in begins if at <= tape.cluster), []).append((tape, share))
    return {at: make_job(code, [tape for tape, _ in some], gpu, [share for _, share in some],
                     [tape.rank for tape, _ in some], shape.ctas_of_sm(gpu))
            for at, some in sorted(by_place.items())}


def _cycles(shape: Shape, gpu: GPUFigures, jobs: Mapping[int, Job],
            runs: Mapping[int, Run]) -> tuple[int, float]:
    """Returns the cycles of the grid, and the share of the SMs' time that is idle. The SMs of a cluster take
    the first clusters together, then each further one adds what it adds where it is recorded."""
    at_once, together, begin = shape.at_once(gpu), shape.ctas_of_sm(gpu), min(runs)
    if shape.clusters <= at_once: return runs[begin].cycles, 1 - shape.busy_sms(gpu) / gpu.sms
    first = {at: _first(one, jobs[at]) for at, one in runs.items()}
    further = {at: (runs[at].cycles - first[at]) / max(1, job.ctas // shape.ctas - together)
               for at, job in jobs.items()}
    servers = max(1, at_once // together)
    ends = deal([float(first[begin])] * servers, _every(shape, gpu, further)[servers * together:])
    cycles = max(ends)
    return round(cycles), 1 - sum(ends) / len(ends) / cycles * servers * shape.ctas / gpu.sms


def _moving(shape: Shape, gpu: GPUFigures, jobs: Mapping[int, Job], runs: Mapping[int, Run],
            cycles: int) -> dict[Cause, float]:
    """Shares of the grid's cycles in which L2 and HBM move what all clusters move."""
    servers = max(1, min(shape.clusters, shape.at_once(gpu)) // shape.ctas_of_sm(gpu))
    def share(busy: Callable[[Run], float]) -> float:
        each = {at: busy(runs[at]) / job.ctas * shape.ctas for at, job in jobs.items()}
        return sum(_every(shape, gpu, each)) / servers / max(1, cycles)
    return {Cause.L2_RATE: share(lambda one: one.l2_busy), Cause.HBM_RATE: share(lambda one: one.hbm_busy)}


def _drain_factor(moving: Mapping[Cause, float], path: dict[Cause, float]) -> float:
    """Returns how much longer all that is moved takes than what was run: nothing waits for the last writes of
    a CTA, but memory takes no more bytes than it can. Adds that to the path."""
    cause = max(moving, key=lambda each: moving[each])
    over = max(1.0, moving[cause])
    for part in path: path[part] /= over
    path[cause] += 1 - 1 / over
    return over


def _uneven(shape: Shape, gpu: GPUFigures, jobs: Mapping[int, Job],
            runs: Mapping[int, Run]) -> tuple[int, float] | None:
    """The same where lengths of clusters repeat with an extent of the grid, as under a causal mask, from the
    steps of each that was recorded; None where they do not."""
    at_once, together = shape.at_once(gpu), shape.ctas_of_sm(gpu)
    if shape.clusters <= at_once: return None
    known = np.array(sorted((at + number, steps) for at, job in jobs.items()
                            for number, steps in enumerate(_steps(job, shape.ctas))))
    if not (row := _row(shape, known)): return None
    cycles = sum(one.cycles for one in runs.values()) * together / known[:, 1].sum()
    every = lengths(known, np.arange(shape.clusters), row) * cycles
    ends = deal(every[:at_once].tolist(), every[at_once:].tolist())
    busy = min(1.0, shape.ctas * at_once / together / gpu.sms)
    return round(max(ends)), 1 - float(every.sum()) / at_once / max(ends) * busy


def _row(shape: Shape, known: np.ndarray) -> int:
    """After how many clusters their lengths repeat, of many that are known; 0 where they do not, or all are
    about as long."""
    return differ(known) and (row_of(known, shape.rows) or row_of(known))


def _steps(job: Job, ctas: int) -> list[int]:
    """Returns the steps of each cluster of a job."""
    whole = np.bincount(job.warps["cta"], job.warps["end"] - job.warps["first"])
    return [int(each) for each in whole.reshape(-1, ctas).sum(1)]


def _first(one: Run, job: Job) -> int:
    """When the last of those that began at once ended."""
    return int(one.ends[job.warps["after"] < 0].max())


def _whole(shape: Shape, gpu: GPUFigures, code: Code, jobs: Mapping[int, Job],
           work: Callable[[Code, Job], int]) -> float:
    """The work of all clusters."""
    each = {at: work(code, job) / job.ctas * shape.ctas for at, job in jobs.items()}
    return sum(_every(shape, gpu, each))


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


def _units(runs: Sequence[Run]) -> dict[str, float]:
    cycles = sum(one.cycles for one in runs)
    sms = len(runs[0].busy)
    busy = np.sum([one.busy.sum(0) for one in runs], 0)
    parts = {name: float(busy[unit]) / cycles / sms / (1 if unit in (Unit.SHARED, Unit.COPY) else 4)
             for unit, name in SHOWN.items()}
    issued = sum(int(one.waited[:, REASONS.index("issued")].sum()) for one in runs)
    parts["issue slots"] = issued / cycles / sms / 4
    parts["L2"] = sum(one.l2_busy for one in runs) / cycles
    parts["HBM"] = sum(one.hbm_busy for one in runs) / cycles
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

def predict(text: str, arch: str, entry: str, shape: Callable[[Resources], Shape],
            name: str | GPUFigures, record: Callable[[Tapes], bool], memory: Sequence[tuple[int, int]],
            log: int = 0, strict: bool = True) -> Timing:
    """Predicts a launch of an entry function on the GPU `name`, or on one of these figures. `record` runs
    chosen clusters on the emulator, and says whether they ended; `memory` has the addresses and sizes of its
    buffers. Raises `ConfigError` for a GPU without figures, or of another architecture, `ToolchainError`
    without ptxas or a disassembler."""
    gpu = figures(name) if isinstance(name, str) else name
    if arch[:5] != gpu.arch[:5]:
        called = name if isinstance(name, str) else gpu.name
        raise ConfigError(f"{called} is of {gpu.arch}, the emulator of {arch}", f"an emulator of {gpu.arch}",
                          "choose another GPU, or another architecture")
    return predict_recording(record_launch(text, entry, shape, gpu, record, memory, strict), gpu, log)
