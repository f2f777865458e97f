"""How long grouped matmuls take on a GPU, roughly: what orders schedules, also those of different templates.

Protocol: a template's cost is a `Prediction`, whose `seconds` are those of the slowest of tensor cores, HBM
and L2. How many rows a group has is known on the device alone: rows are taken to be dealt at random, so that
counts are Poisson's. `active` and `tiles` are the expected numbers of groups that have rows, and of tiles of
so many rows.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, exp, lgamma, log, sqrt
from typing import Any

from tinygrad_nv.tile.gpu import STREAMING, GPUModel
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU, AnyTemplate

BESIDE = 0.04       # fitted to predictions of launches (bench/timing/rows_moe.py), within 10 %
TIE, NEAR = 1.02, 1.003     # predictions as near as this are the same: of templates, within one
ALIKE, SHORT_S = 1.03, 1e-4     # and of short launches; an H100 took 1 to 6 % longer for larger tiles there
SAME = 1.01         # of the smallest tile
MANY = 4096         # rows of a group above which a partial tile is half of one


Priced = tuple[Any, Schedule]   # a template's prediction


@dataclass(frozen=True)
class Prediction:
    """Seconds of a launch, in waves of CTAs, in HBM and in L2."""
    computing: float
    hbm: float
    l2: float
    launch: float

    @property
    def seconds(self) -> float:
        """All together: what is faster than the slowest disturbs it by `BESIDE` of its time."""
        each = self.computing, self.hbm, self.l2
        return (1 - BESIDE) * max(each) + BESIDE * sum(each) + self.launch

    @property
    def bound(self) -> str:
        """The resource that takes most of the time."""
        return max((self.computing, "arithmetic"), (self.hbm, "HBM"), (self.l2, "L2"),
                   (self.launch, "launch"))[1]


@lru_cache(4096)
def cheapest(templates: tuple[AnyTemplate, ...], spec: Any, gpu: GPU,
             size: Callable[[Any], int] | None = None) -> Schedule | None:
    """The legal candidate of the lowest cost; of those of a template as near as `NEAR`, and of the best of
    templates as near as `TIE`, the first. Of launches of less than `SHORT_S` that wait for HBM, of all as
    near as `ALIKE`, one of the smallest tile by its `size`: while the last CTAs load, others have ended."""
    by_template = [[(each.cost(spec, s, gpu), s) for s in each.candidates(spec, gpu)
                    if each.cost is not None and not each.problems(spec, s, gpu)] for each in templates]
    best = [_first(legal, NEAR) for legal in by_template if legal]
    if not best: return None
    predicted, chosen = _first(best, TIE)
    if size is None or predicted.bound != "HBM" or predicted.seconds > SHORT_S: return chosen
    alike = _near([pair for legal in by_template for pair in legal], ALIKE)
    least = min(size(s) for _, s in alike)
    return _first([pair for pair in alike if size(pair[1]) == least], SAME)[1]


def _near(pairs: Sequence[Priced], near: float) -> list[Priced]:
    """Returns the pairs whose predictions are at most `near` times the least."""
    least = min(predicted.seconds for predicted, _ in pairs)
    return [pair for pair in pairs if pair[0].seconds <= near * least]


def _first(pairs: Sequence[Priced], near: float) -> Priced: return _near(pairs, near)[0]


@lru_cache(4096)
def tiles(spec: GroupedGemmSpec, rows: int) -> float:
    """Tiles of `rows` rows, of all groups. Those of one token are different ones."""
    if spec.gather and spec.x_rows == 1: return float(spec.rows)
    return spec.groups * tiles_of_group(spec.rows / spec.groups, rows)


@lru_cache(4096)
def tiles_of_group(mean: float, rows: int) -> float:
    """Tiles of `rows` rows that a group of `mean` rows has."""
    if mean > MANY: return mean / rows + 0.5
    last = int(mean + 8 * sqrt(mean) + 16)
    return sum(exp(count * log(mean) - mean - lgamma(count + 1)) * ceil(count / rows)
               for count in range(1, last))


def active(spec: GroupedGemmSpec) -> float:
    """Groups that have rows."""
    return tiles(spec, 1 << 30)


def hbm_seconds(spec: GroupedGemmSpec, gpu: GPUModel) -> float:
    """Everything once."""
    read = (active(spec) * spec.n + min(spec.x_rows, spec.rows)) * spec.k * spec.dtype.itemsize
    return (read + spec.rows * spec.columns * spec.out.itemsize) / (STREAMING * gpu.hbm_bytes_per_s)
