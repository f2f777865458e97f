"""Which schedule a product gets, or why none.

Protocol: `choose` takes the winner that the schedule database has, else what the cost model says: the best of
the legal tiles of each template's defaults.py, then of their variants (stages, clusters, splits, stream-K,
widths). The model's answer is a function of spec, architecture and number of SMs alone, the same in every
process. None means that no template takes the product, and `why_not` says why in words for a reader.
"""
from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tinygrad.helpers import BEAM

from tinygrad_nv.templates import TABLE
from tinygrad_nv.tile import database
from tinygrad_nv.tile.gemm.candidates import starts
from tinygrad_nv.tile.gemm.cost import Model, Prediction
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Gemv
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gpu import machine_for
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.template import GPU

if TYPE_CHECKING:
    from tinygrad_nv.runtime.driver import Driver

TIE = 1.02                          # predictions as near as this are the same
KEPT = 4                            # tiles whose variants are looked at


def choose(spec: GemmSpec, arch: str, sm_count: int = 0, driver: Driver | None = None) -> GemmSchedule | None:
    """The schedule for a product on a GPU with `sm_count` SMs (0: as the architecture's first has); None
    when there is none. With BEAM=N candidates are tried, on the GPU that `driver` drives, or counted by the
    emulator."""
    if (known := database.lookup(spec, arch)) is not None: return known
    chosen = analytic(spec, arch, sm_count)
    if chosen is None or BEAM.value < 1: return chosen
    from tinygrad_nv.tile.gemm.tune import search  # the emulator is loaded by those who try
    return search(spec, arch, BEAM.value, sm_count, driver) or chosen


@functools.lru_cache(4096)
def analytic(spec: GemmSpec, arch: str, sm_count: int = 0) -> GemmSchedule | None:
    """The cost model's choice; of those it cannot tell apart, what the defaults have first."""
    if arch not in SMEM_BYTES: return None
    model, gpu, size = Model(spec, machine_for(arch, sm_count)), GPU(arch), spec.a.dtype.itemsize
    sms = model.machine.sm_count
    first = [s for s in starts(spec, gpu) if s.worthwhile(spec)]
    kept = _tiles(_ranked([v for s in first for v in s.filling(spec, sms)], model), spec, gpu)
    variants = [v for s in kept for ring in s.rings(arch, size) for v in ring.around(spec, sms)]
    ranked = _ranked(variants, model)
    if (best := _first_legal(ranked, spec, gpu)) is None: return None
    others = [ring for s in best[0].beside(spec) for ring in s.rings(arch, size)]
    if others:
        ranked = sorted([*ranked, *_ranked(others, model)], key=_seconds)
        best = _first_legal(ranked, spec, gpu) or best
    ties = [pair for pair in ranked if pair[1].seconds <= TIE * best[1].seconds]
    order = {s.key: i for i, s in enumerate(first)}  # tiles that it has not come after those that it has
    best = _first_legal(sorted(ties, key=lambda pair: order.get(pair[0].key, len(order))), spec, gpu) or best
    return best[0]


def _tiles(ranked: Iterable[tuple[GemmSchedule, Prediction]], spec: GemmSpec, gpu: GPU) -> list[GemmSchedule]:
    """The first few tiles that are legal, with however many stages, each once and by itself."""
    made: dict[GemmSchedule, GemmSchedule] = {}
    for s, _ in ranked:
        if len(made) == KEPT: break
        if (bare := s.bare) in made: continue
        if any(not TABLE.problems(spec, ring, gpu) for ring in s.rings(gpu.arch, spec.a.dtype.itemsize)):
            made[bare] = bare
    return list(made)


def _ranked(schedules: Iterable[GemmSchedule], model: Model) -> list[tuple[GemmSchedule, Prediction]]:
    """The fastest first; as given where two are equal."""
    predicted = [(s, model.predict(s)) for s in schedules]
    return sorted(predicted, key=_seconds)


def _seconds(pair: tuple[GemmSchedule, Prediction]) -> float: return pair[1].seconds


def _first_legal(pairs: Iterable[tuple[GemmSchedule, Prediction]], spec: GemmSpec,
                 gpu: GPU) -> tuple[GemmSchedule, Prediction] | None:
    return next((pair for pair in pairs if not TABLE.problems(spec, pair[0], gpu)), None)


def why_not(spec: GemmSpec, arch: str) -> str:
    """Why `choose` finds nothing: what each template says of the schedule it likes best; "" when it does."""
    if analytic(spec, arch) is not None: return ""
    gpu = GPU(arch)
    if arch not in SMEM_BYTES: return TABLE.problems(spec, Gemv(), gpu)[0]
    said: dict[str, Sequence[str]] = {}
    for s in (*starts(spec, gpu), Gemv()):  # gemv has none for many rows
        found = TABLE.problems(spec, s, gpu)
        if s.template not in said or len(found) < len(said[s.template]): said[s.template] = found
    return "; ".join(f"{template}: {', '.join(found)}" for template, found in said.items())
