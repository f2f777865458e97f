"""The best of some schedules, by trying them.

Protocol: `tune(spec, gpu, beam)` takes the `PER_BEAM` · beam schedules that are liked best, and what `choose`
would take without a database: of a matmul those that the cost model likes, of other families their templates'
candidates and what is near to these. Each is built and, where there is a ptxas, assembled, several at a time;
those that spill or that ptxas changes are out. The others are timed (clock.py): on a GPU; without one by the
timing model; a matmul without figures for that by counters of the emulator. Nothing in the latter two depends
on the machine, so the same schedule wins each time. On a GPU that the timing model has figures of, that model
takes `WIDER` times as many first, and the best of these are measured. The winner goes to the schedule
database.

`search` is what BEAM=N does while a graph is made into kernels: `tune`, unless the database knows.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from tinygrad_nv.errors import NVError, ToolchainError
from tinygrad_nv.progress import Progress, bar
from tinygrad_nv.ptx.assemble import Assembly, assemble, find_program
from tinygrad_nv.ptx.timing.listing import LINES
from tinygrad_nv.tile import database, emulated
from tinygrad_nv.tile.clock import Clock, How
from tinygrad_nv.tile.kernel import Chain, TileKernel
from tinygrad_nv.tile.known_error import find_least_ratio
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU, Family
from tinygrad_nv.tile.templates import TABLE

PER_BEAM, WIDER = 4, 2


@dataclass(frozen=True)
class Candidate:
    """A schedule that was tried. `predicted` is the cost model's prediction, None where there is no such
    model; `modelled` are the timing model's seconds, where it was asked; `seconds` are known as `how` says,
    None where it is out, and `why`. `registers` is 0 without ptxas."""
    schedule: Schedule
    predicted: Any = None
    registers: int = 0
    smem_bytes: int = 0
    modelled: float | None = None
    seconds: float | None = None
    how: How = "counted"
    why: str = ""


@dataclass(frozen=True)
class Built:
    """A candidate with what its template built, and its kernels assembled; `made` None where it is out."""
    candidate: Candidate
    made: Any = None
    assembled: tuple[Assembly, ...] = ()


def tune(spec: Any, gpu: GPU, beam: int = 1,
         progress: Progress = lambda done, count: None) -> list[Candidate]:
    """Candidates, the fastest first, those that are out last; none where no template takes the spec. The
    first is stored in the database. Raises `ToolchainError` where nothing can time them, `OSError` where the
    database cannot be written."""
    family, model, count = TABLE.family(gpu.kind, type(spec)), emulated.clock_of(gpu), PER_BEAM * beam
    assert family is not None, f"a {type(spec).__name__} has a family"
    how = _how(gpu, family, model)
    both = model is not None and gpu.clock is not None
    wanted = schedules(spec, gpu, count * WIDER if both else count)
    steps = len(wanted) + min(count, len(wanted)) * both
    tried: list[Built] = []
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        for each in pool.map(lambda s: _build(spec, s, gpu, model is not None), wanted):
            tried.append(_time(each, spec, gpu, family, model or gpu.clock))
            progress(len(tried), steps)
    finally: pool.shutdown(cancel_futures=True)
    if both: tried = [*_measure(tried, spec, gpu, family, count, lambda n: progress(len(wanted) + n, steps))]
    # of modelled times that tell nothing apart what was liked better is taken
    tie = find_least_ratio(spec) if how == "modelled" else 1.0
    found = _rank([replace(each.candidate, how=how) for each in tried], tie)
    if found and (best := found[0]).seconds is not None:
        conditions = gpu.clock.conditions() if gpu.clock is not None and how == "measured" else {}
        named = "" if how == "counted" else gpu.figures
        database.store([database.Entry(database.tuning_key(spec), gpu.arch, database.toolchain(),
                                       best.schedule, best.seconds, how, named, database.origin(),
                                       **conditions)])
    return found


def _how(gpu: GPU, family: Family, model: Clock | None) -> How:
    """How seconds are known."""
    if (clock := gpu.clock or model) is not None: return clock.how
    if family.counter_cost is not None: return "counted"
    raise ToolchainError(f"nothing times {family.name} kernels on {gpu.arch}",
                         "a GPU, or ptxas, nvdisasm and figures of one for the timing model",
                         "pip install 'tinygrad-nv[emulator]', or set NV_TIMING_GPU")


def search(spec: Any, gpu: GPU, beam: int, known: database.Entry | None = None) -> Schedule | None:
    """The best schedule by `tune`, or what is known as well as that would tell; None where there is none. A
    database that cannot be written is noted."""
    family = TABLE.family(gpu.kind, type(spec))
    try:
        how = "counted" if family is None else _how(gpu, family, emulated.clock_of(gpu))
        tells = {"measured": database.THROTTLED, "modelled": database.MODELLED}.get(how, database.COUNTED)
        rank = None if known is None else known.rank(gpu.figures)
        if known is not None and rank is not None and rank <= tells: return known.schedule
        with bar(f"trying schedules of {spec}") as progress: tried = tune(spec, gpu, beam, progress)
    except ToolchainError: tried = []
    except OSError as error:
        database.note(f"{database.path()} cannot be written: {error}")
        tried = []
    if tried and tried[0].seconds is not None: return tried[0].schedule
    return None if known is None else known.schedule


def schedules(spec: Any, gpu: GPU, count: int) -> list[Schedule]:
    """Returns the schedules that are worth trying: the default, and so many others that are legal."""
    family = TABLE.family(gpu.kind, type(spec))
    if family is None or (default := family.default(spec, gpu)) is None: return []
    if family.candidates is not None: return [*family.candidates(spec, gpu, count)]
    first = (s for each in TABLE.templates(gpu.kind, spec) for s in each.candidates(spec, gpu))
    beside = chain.from_iterable((s, *s.near) for s in chain([default], first))
    return [*dict.fromkeys(s for s in beside if not TABLE.problems(spec, s, gpu))][:count + 1]


# **** one candidate ****

def _build(spec: Any, s: Schedule, gpu: GPU, lines: bool) -> Built:
    """A candidate's kernels, assembled where that can be; with `lines` of PTX as the timing model's."""
    cost = TABLE.of(s).cost
    candidate = Candidate(s, None if cost is None else cost(spec, s, gpu))
    try:
        clusters = gpu.clusters if gpu.clock is None else gpu.clock.clusters
        made = TABLE.build(spec, s, replace(gpu, clusters=clusters))
        kernels = _kernels(made)
        candidate = replace(candidate, smem_bytes=max(each.dynamic_smem for each in kernels))
        if find_program("ptxas") is None: return Built(candidate, made)
        assembled = tuple(assemble(each.ptx, gpu.arch, LINES if lines else ()) for each in kernels)
    except NVError as error: return Built(replace(candidate, why=error.found))
    used = [one.kernels[each.name] for one, each in zip(assembled, kernels, strict=True)]
    candidate = replace(candidate, registers=max(each.registers for each in used), smem_bytes=max(
        each.dynamic_smem + one.shared_bytes for each, one in zip(kernels, used, strict=True)))
    if spilled := sum(each.spill_store_bytes + each.spill_load_bytes for each in used):
        return Built(replace(candidate, why=f"spills {spilled} B"))
    return Built(candidate, made, assembled)


def _kernels(made: Any) -> list[TileKernel]:
    """Returns the kernels that a call launches."""
    return [each for one in ([made.first, made.second] if isinstance(made, Chain) else [made])
            for each in one.kernels]


def _time(built: Built, spec: Any, gpu: GPU, family: Family, clock: Clock | None) -> Built:
    """With its seconds, unless it is out."""
    candidate = built.candidate
    if built.made is None: return built
    try:
        if clock is not None: taken = clock.seconds(built.made, spec, built.assembled)
        else:
            assert family.counter_cost is not None, "asked before"
            taken = family.counter_cost(spec, candidate.schedule, gpu, candidate.registers)
    except NVError as error:
        return replace(built, candidate=replace(candidate, seconds=None, why=error.found))
    modelled_s = taken if clock is not None and clock.how == "modelled" else candidate.modelled
    return replace(built, candidate=replace(candidate, seconds=taken, modelled=modelled_s, why=""))


def _measure(tried: Sequence[Built], spec: Any, gpu: GPU, family: Family, count: int,
              progress: Callable[[int], None]) -> Iterator[Built]:
    """The best of those that were modelled, timed on the GPU, and those that the model could not time where
    there are too few; the others are out."""
    ordered = sorted(tried, key=lambda each: (each.made is None, *_order(each.candidate)))
    for number, each in enumerate(ordered):
        if each.made is None: yield each
        elif number < count:
            yield _time(each, spec, gpu, family, gpu.clock)
            progress(number + 1)
        else: yield Built(replace(each.candidate, seconds=None,
                                  why=each.candidate.why or "modelled slower than what was measured"))


def _rank(candidates: Sequence[Candidate], tie: float) -> list[Candidate]:
    """The fastest first, in their order of those that are as fast as the first."""
    most = tie * min((each.seconds for each in candidates if each.seconds is not None), default=0.0)
    first = [each for each in candidates if each.seconds is not None and each.seconds <= most]
    return first + sorted((each for each in candidates if each not in first), key=_order)


def _order(candidate: Candidate) -> tuple[bool, float, float]:
    """The fastest first; of those without seconds, what the model likes better."""
    never = float("inf")
    return (candidate.seconds is None, candidate.seconds or never, candidate.modelled or never)
