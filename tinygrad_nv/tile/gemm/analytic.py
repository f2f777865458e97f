"""Which schedule the cost model likes best.

Protocol: `analytic` is the best of the legal tiles of defaults.py, then of their variants (stages, clusters,
splits, stream-K, widths). It is a function of spec, architecture and number of SMs alone, the same in every
process.
"""
from __future__ import annotations

import functools
from collections.abc import Iterable

from tinygrad_nv.tile.gemm.candidates import around, beside, filling, rings, worthwhile
from tinygrad_nv.tile.gemm.cost import Model, Prediction
from tinygrad_nv.tile.gemm.defaults import TIE, starts
from tinygrad_nv.tile.gemm.legality import problems
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gpu import machine_for
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.schedule import Schedule

KEPT = 4                            # tiles whose variants are looked at


@functools.lru_cache(4096)
def analytic(spec: GemmSpec, arch: str, sm_count: int = 0) -> Schedule | None:
    """The cost model's choice; of those it cannot tell apart, what the defaults have first."""
    if arch not in SMEM_BYTES: return None
    model = Model(spec, machine_for(arch, sm_count))
    size, sms = spec.a.dtype.itemsize, model.machine.sm_count
    first = [s for s in starts(spec, arch) if worthwhile(s, spec)]
    kept = _tiles(_ranked([v for s in first for v in filling(s, spec, sms)], model), spec, arch)
    variants = [v for s in kept for ring in rings(s, arch, size) for v in around(ring, spec, sms)]
    ranked = _ranked(variants, model)
    if (best := _first_legal(ranked, spec, arch)) is None: return None
    others = [ring for s in beside(best[0], spec) for ring in rings(s, arch, size)]
    if others:
        ranked = sorted([*ranked, *_ranked(others, model)], key=_seconds)
        best = _first_legal(ranked, spec, arch) or best
    ties = [pair for pair in ranked if pair[1].seconds <= TIE * best[1].seconds]
    order = {_tile(s): i for i, s in enumerate(first)}
    best = _first_legal(sorted(ties, key=lambda pair: _preference(pair[0], order)), spec, arch) or best
    return best[0]


def _tiles(ranked: Iterable[tuple[Schedule, Prediction]], spec: GemmSpec, arch: str) -> list[Schedule]:
    """The first few tiles that are legal, with however many stages, each once and by itself."""
    made: dict[Schedule, Schedule] = {}
    for s, _ in ranked:
        bare = s if s.template == "gemv" else s.split(1).cluster(1)
        if len(made) == KEPT: break
        if bare in made: continue
        if any(not problems(ring, spec, arch) for ring in rings(s, arch, spec.a.dtype.itemsize)):
            made[bare] = bare
    return list(made)


def _ranked(schedules: Iterable[Schedule], model: Model) -> list[tuple[Schedule, Prediction]]:
    """The fastest first; as given where two are equal."""
    predicted = [(s, model.predict(s)) for s in schedules]
    return sorted(predicted, key=_seconds)


def _seconds(pair: tuple[Schedule, Prediction]) -> float: return pair[1].seconds


def _first_legal(pairs: Iterable[tuple[Schedule, Prediction]], spec: GemmSpec,
                 arch: str) -> tuple[Schedule, Prediction] | None:
    return next((pair for pair in pairs if not problems(pair[0], spec, arch)), None)


def _preference(s: Schedule, order: dict[tuple[object, ...], int]) -> int:
    """Where the table of defaults has the tile; after all of them where it has not."""
    return order.get(_tile(s), len(order))


def _tile(s: Schedule) -> tuple[object, ...]:
    return s.template, s.block_m, s.block_n, s.block_k, s.warps_m, s.warps_n, s.mode, s.swap
