"""Choice of the schedule that the cost model likes best.

Protocol: `analytic` is the best of the legal tiles of each template.py, then of their variants
(stages, clusters, splits, stream-K, widths). It is a function of spec, architecture and number of SMs alone,
the same in every process.

`starts(spec, gpu)` are schedules worth trying first, in the order of preference; `space(spec, gpu)` yields
legal schedules, each once, in a fixed order. What is left out on purpose: tiles more than twice as large as
the matmul, sums beside which ptxas spills a long epilogue, splits that make more CTAs than two for each SM or
sums of fewer than two steps, and rings other than those worth trying (schedules.py).

`choose_ordered` has the class of a matmul's schedules (tile/order.py): by tensor cores, instruction after
instruction along k. A sum is one CTA's, from its first element on: no split-K, no stream-K, no gemv, whose
warps share k. Of 16-bit operands and tf32 `wgmma` and `mma` of one architecture add the same terms in one
step and round alike (numerics/semantics), so that either is in the class. Sums of FP8 are promoted at places
that differ between them: there the first template of `templates` that takes a matmul of many rows has all of
them.
"""
from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any

from tinygrad_nv.tile.gemm.cost import CostModel, Prediction
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, RingSchedule
from tinygrad_nv.tile.gemm.spec import FP8, GemmSpec
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.order import Ordered
from tinygrad_nv.tile.template import GPU, AnyTemplate
from tinygrad_nv.tile.templates import TABLE

TIE = 1.02                          # predictions as near as this are the same
KEPT = 4                            # tiles whose variants are looked at
SPARSE = 1 / 3                      # of the SMs, fewer than which do not bring what HBM has
WORDS = "tensor cores along k, one CTA a sum"
MANY = 128      # rows for which templates are asked where one has to have all


@functools.lru_cache(4096)
def analytic(spec: GemmSpec, arch: str, sm_count: int = 0) -> GemmSchedule | None:
    """The cost model's choice; of those it cannot tell apart, what the defaults have first."""
    if arch not in SMEM_BYTES: return None
    model, gpu, size = CostModel(spec, gpu_model_for(arch, sm_count)), GPU(arch), spec.a.dtype.itemsize
    sms = model.gpu_model.sm_count
    first = [s for s in starts(spec, gpu) if s.worthwhile(spec)]
    kept = _tiles(_rank([v for s in first for v in s.fill_sms(spec, sms)], model), spec, gpu)
    variants = [v for s in kept for ring in s.stage_variants(arch, size) for v in ring.variants(spec, sms)]
    ranked = _rank(variants, model)
    if (best := _first_legal(ranked, spec, gpu)) is None: return None
    others = [ring for s in best[0].width_variants(spec) for ring in s.stage_variants(arch, size)]
    if others:
        ranked = sorted([*ranked, *_rank(others, model)], key=_seconds)
        best = _first_legal(ranked, spec, gpu) or best
    ties = [pair for pair in ranked if pair[1].seconds <= TIE * best[1].seconds]
    order = {s.key: i for i, s in enumerate(first)}  # tiles that it has not come after those that it has
    def preference(pair: tuple[GemmSchedule, Prediction]) -> tuple[bool, int, bool]:
        s, (streams, sparse) = pair[0], _streaming(pair[1])
        return sparse, order.get(s.key, len(order)), streams and s.cluster_shape != (1, 1)
    best = _first_legal(sorted(ties, key=preference), spec, gpu) or best
    return best[0]


def _streaming(predicted: Prediction) -> tuple[bool, bool]:
    """Whether it waits for HBM, and then, whether a second wave has too few CTAs for all that HBM has. On an
    H100 160 CTAs of 64 columns took 65 µs, 80 of 128 columns 57, and with few rows clusters, which spare L2,
    took up to 4 % longer than none."""
    streams = predicted.bound == "HBM"
    return streams, streams and 1 < predicted.waves < 1 + SPARSE


def _tiles(ranked: Iterable[tuple[GemmSchedule, Prediction]], spec: GemmSpec, gpu: GPU) -> list[GemmSchedule]:
    """The first few tiles that are legal, with however many stages, each once and by itself."""
    made: dict[GemmSchedule, GemmSchedule] = {}
    for s, _ in ranked:
        if len(made) == KEPT: break
        if (tile := s.base_tile) in made: continue
        if any(not TABLE.problems(spec, ring, gpu)
               for ring in s.stage_variants(gpu.arch, spec.a.dtype.itemsize)):
            made[tile] = tile
    return list(made)


def _rank(schedules: Iterable[GemmSchedule], model: CostModel) -> list[tuple[GemmSchedule, Prediction]]:
    """The fastest first; as given where two are equal."""
    predicted = [(s, model.predict(s)) for s in schedules]
    return sorted(predicted, key=_seconds)


def _seconds(pair: tuple[GemmSchedule, Prediction]) -> float: return pair[1].seconds


def _first_legal(pairs: Iterable[tuple[GemmSchedule, Prediction]], spec: GemmSpec,
                 gpu: GPU) -> tuple[GemmSchedule, Prediction] | None:
    return next((pair for pair in pairs if not TABLE.problems(spec, pair[0], gpu)), None)


def starts(spec: GemmSpec, gpu: GPU) -> list[GemmSchedule]:
    """Schedules to start from for a matmul, in the order of preference."""
    return [s for template in TABLE.templates("gpu", spec) for s in template.candidates(spec, gpu)]


def space(spec: GemmSpec, gpu: GPU) -> Iterator[GemmSchedule]:
    """Every legal schedule."""
    size, seen = spec.a.dtype.itemsize, set()
    sms = gpu_model_for(gpu.arch, gpu.sm_count).sm_count
    every = (template.schedule.every(gpu.arch, size) for template in TABLE.templates("gpu", spec))
    for tile in chain(starts(spec, gpu), *every):
        if not tile.worthwhile(spec): continue
        for deep in tile.stage_variants(gpu.arch, size):
            for schedule in deep.variants(spec, sms):
                if schedule in seen: continue
                seen.add(schedule)
                if not TABLE.problems(spec, schedule, gpu): yield schedule


def choose_ordered(templates: Sequence[AnyTemplate], spec: Any, gpu: GPU, gemm: GemmSpec) -> Ordered | None:
    """The fastest schedule of the class; None where there is none. `gemm` is the matmul of a spec that has
    more than that."""
    exact, words = gemm.a.dtype in FP8, WORDS
    if exact:
        templates = [each for each in templates if _takes_many(each, gemm, gpu)][:1]
        words = f"{WORDS}, {templates[0].name}" if templates else ""
    found = [s for each in templates if (s := _best(each, spec, gpu, gemm.a.dtype.itemsize)) is not None]
    return Ordered(found[0], words) if found else None


@lru_cache(4096)
def _best(template: AnyTemplate, spec: Any, gpu: GPU, itemsize: int) -> RingSchedule | None:
    """A template's fastest by its cost; the first where nothing is known of it."""
    legal = [s for s in _without_splits(template, spec, gpu, itemsize) if not template.problems(spec, s, gpu)]
    cost = template.cost
    if cost is None or not legal: return legal[0] if legal else None
    return min(legal, key=lambda s: float(cost(spec, s, gpu).seconds))


def _without_splits(template: AnyTemplate, spec: Any, gpu: GPU, itemsize: int) -> Iterator[RingSchedule]:
    """A template's candidates, each sum by one CTA."""
    for s in template.candidates(spec, gpu):
        if not isinstance(s, RingSchedule): continue
        if isinstance(spec, GemmSpec) and not s.worthwhile(spec): continue
        yield from dict.fromkeys((s.without_splits, *s.without_splits.stage_variants(gpu.arch, itemsize)))


def _takes_many(template: AnyTemplate, gemm: GemmSpec, gpu: GPU) -> bool:
    many = replace(gemm, m=MANY, a=replace(gemm.a, mn=gemm.k if gemm.a.k == 1 else gemm.a.mn))
    return _best(template, many, gpu, gemm.a.dtype.itemsize) is not None
