"""The best of some schedules, by trying them.

Protocol: `tune(spec, arch, beam)` takes the `PER_BEAM` · beam candidates that the cost model likes best, and
what `choose` would take without a database. Each is built and, where there is a ptxas, assembled, several at
a time; those that spill or that ptxas changes are out. The others are timed by a `Clock`, or counted by the
emulator, whose counters the cost model turns into seconds (`Work`): nothing in that depends on the machine,
so the same one wins each time. The winner goes to the schedule database.

`search` is what BEAM=N does while a graph is made into kernels: `tune`, unless the database knows.
"""
from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from tinygrad_nv.errors import NVError
from tinygrad_nv.ptx.assemble import Assembly, assemble, find_program
from tinygrad_nv.ptx.gpcs import Clusters
from tinygrad_nv.tile import database
from tinygrad_nv.tile.clock import Clock
from tinygrad_nv.tile.gemm import trial
from tinygrad_nv.tile.gemm.analytic import analytic
from tinygrad_nv.tile.gemm.candidates import space
from tinygrad_nv.tile.gemm.cost import CostModel, Prediction
from tinygrad_nv.tile.gemm.schedules import GemmSchedule
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

PER_BEAM, RINGS = 4, 2
Progress = Callable[[int, int], None]    # candidates done, of how many


@dataclass(frozen=True)
class Candidate:
    """A schedule that was tried. `seconds` by counters or a clock, None where it is out, and `why`.
    `registers` is 0 without ptxas."""
    schedule: GemmSchedule
    predicted: Prediction
    registers: int = 0
    smem_bytes: int = 0
    seconds: float | None = None
    why: str = ""


def tune(spec: GemmSpec, arch: str, beam: int = 1, sm_count: int = 0, clock: Clock | None = None,
         progress: Progress = lambda done, count: None) -> list[Candidate]:
    """Candidates, the fastest first, those that are out last; none where no template takes the matmul. The
    first is stored in the database. Without a clock they are counted on the emulator."""
    model = CostModel(spec, gpu_model_for(arch, sm_count))
    wanted, tried = candidates(model, arch, beam), []
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        clusters = () if clock is None else clock.clusters
        for made in pool.map(lambda s: _built(model, s, arch, clusters), wanted):
            tried.append(_timed(model, arch, clock, *made))
            progress(len(tried), len(wanted))
    finally: pool.shutdown(cancel_futures=True)
    # equal seconds: what the model liked better
    tried.sort(key=lambda c: (c.seconds is None, c.seconds or 0.0))
    if tried and (best := tried[0]).seconds is not None:
        database.store([database.Entry(spec, arch, database.toolchain(), best.schedule, best.seconds,
                                       "counted" if clock is None else "measured")])
    return tried


def search(spec: GemmSpec, arch: str, beam: int, sm_count: int = 0,
           clock: Clock | None = None) -> GemmSchedule | None:
    """The database's winner, found first if there is none. A database that cannot be written is noted."""
    if (known := database.lookup(spec, arch)) is not None: return known
    try: tried = tune(spec, arch, beam, sm_count, clock)
    except OSError as error:
        database.note(f"{database.path()} cannot be written: {error}")
        return None
    return tried[0].schedule if tried and tried[0].seconds is not None else None


def candidates(model: CostModel, arch: str, beam: int) -> list[GemmSchedule]:
    """The model's favourites, what it chooses first; of those that differ in stages alone, two."""
    favourite = analytic(model.spec, arch, model.gpu_model.sm_count)
    if favourite is None: return []
    legal = space(model.spec, GPU(arch, model.gpu_model.sm_count))
    ranked = sorted(legal, key=lambda s: model.predict(s).seconds)
    made, alike = [favourite], Counter([favourite.ringless])
    for s in ranked:
        if len(made) > PER_BEAM * beam: break
        if s == favourite or alike[s.ringless] >= RINGS: continue
        alike[s.ringless] += 1
        made.append(s)
    return made


def _built(model: CostModel, s: GemmSchedule, arch: str, clusters: Clusters
           ) -> tuple[Candidate, GemmKernel | None, Assembly | None]:
    """A candidate's kernel, assembled where that can be."""
    candidate = Candidate(s, model.predict(s))
    try:
        kernel = TABLE.build(model.spec, s, GPU(arch, model.gpu_model.sm_count, clusters))
        candidate = replace(candidate, smem_bytes=kernel.dynamic_smem)
        if find_program("ptxas") is None: return candidate, kernel, None
        made = assemble(kernel.ptx, arch)
    except NVError as error: return replace(candidate, why=error.found), None, None
    used = made.kernels[kernel.name]
    candidate = replace(candidate, registers=used.registers,
                        smem_bytes=candidate.smem_bytes + used.shared_bytes)
    if spilled := used.spill_store_bytes + used.spill_load_bytes:
        return replace(candidate, why=f"spills {spilled} B"), None, None
    return candidate, kernel, made


def _timed(model: CostModel, arch: str, clock: Clock | None, candidate: Candidate, kernel: GemmKernel | None,
           made: Assembly | None) -> Candidate:
    """With its seconds, unless it is out."""
    if kernel is None: return candidate
    try: taken = _counted(model, arch, candidate) if clock is None else \
        clock.seconds(kernel, model.spec, made)
    except NVError as error: return replace(candidate, why=error.found)
    return replace(candidate, seconds=taken)


def _counted(model: CostModel, arch: str, candidate: Candidate) -> float:
    """The cost model's seconds, of counters and of registers as they are."""
    s = candidate.schedule
    done = trial.counted(trial.counters(model.spec, s, arch), model, s)
    return model.timed(s, done, candidate.registers).seconds
