"""The class of a matmul's schedules on GPUs: by tensor cores, instruction after instruction along k.

Protocol: tile/order.py. A sum is one CTA's, from its first element on: no split-K, no stream-K, no gemv,
whose warps share k. Of 16-bit operands and tf32 `wgmma` and `mma` of one architecture add the same terms in
one step and round alike (numerics/semantics), so that either is in the class. Sums of FP8 are promoted at
places that differ between them: there the first template of `templates` that takes a matmul of many rows has
all of them.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tinygrad_nv.tile.gemm.schedules import RingSchedule
from tinygrad_nv.tile.gemm.spec import FP8, GemmSpec
from tinygrad_nv.tile.order import Ordered
from tinygrad_nv.tile.template import GPU, AnyTemplate

WORDS = "tensor cores along k, one CTA a sum"
MANY = 128      # rows for which templates are asked where one has to have all


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
