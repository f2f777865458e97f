"""Choice of the schedule that the cost model likes best.

Protocol: `analytic` is the best of the legal tiles of each template's defaults.py, then of their variants
(stages, clusters, splits, stream-K, widths). It is a function of spec, architecture and number of SMs alone,
the same in every process.
"""
from __future__ import annotations

import functools
from collections.abc import Iterable

from tinygrad_nv.tile.gemm.candidates import starts
from tinygrad_nv.tile.gemm.cost import CostModel, Prediction
from tinygrad_nv.tile.gemm.schedules import GemmSchedule
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

TIE = 1.02                          # predictions as near as this are the same
KEPT = 4                            # tiles whose variants are looked at
SPARSE = 1 / 3                      # of the SMs, fewer than which do not bring what HBM has


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
        if (bare := s.base_tile) in made: continue
        if any(not TABLE.problems(spec, ring, gpu)
               for ring in s.stage_variants(gpu.arch, spec.a.dtype.itemsize)):
            made[bare] = bare
    return list(made)


def _rank(schedules: Iterable[GemmSchedule], model: CostModel) -> list[tuple[GemmSchedule, Prediction]]:
    """The fastest first; as given where two are equal."""
    predicted = [(s, model.predict(s)) for s in schedules]
    return sorted(predicted, key=_seconds)


def _seconds(pair: tuple[GemmSchedule, Prediction]) -> float: return pair[1].seconds


def _first_legal(pairs: Iterable[tuple[GemmSchedule, Prediction]], spec: GemmSpec,
                 gpu: GPU) -> tuple[GemmSchedule, Prediction] | None:
    return next((pair for pair in pairs if not TABLE.problems(spec, pair[0], gpu)), None)
