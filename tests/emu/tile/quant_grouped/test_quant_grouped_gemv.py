"""quant_grouped_gemv on the emulator: whole numbers to the bit for many routings, random numbers near
float64's, types, orders of copies."""
from __future__ import annotations

from dataclasses import replace

import pytest
from tinygrad.dtype import dtypes

from tests.support.tile.grouped_case import routings
from tests.support.tile.quant_grouped_case import (
    BF16,
    F16,
    ROUNDED,
    TYPES,
    each_activation,
    exact,
    near,
    spec_of,
)
from tinygrad_nv.ptx.emulator import LATE
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedGemv
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

S = QuantGroupedGemv().warps(2)
AMPERE, HOPPER = GPU("sm_80", 4), GPU("sm_90a", 4)
GROUPS, ROWS = 5, 50
RAGGED = [20, 0, 7, 20, 1]
# K has several iterations of a warp and no whole unit; columns end within a tile
PLAIN = GroupedGemmSpec(GROUPS, ROWS, 40, 608, BF16)
GATHERED = replace(PLAIN, sources=25, gather=2, biased=True)
SCATTERED = replace(PLAIN, scatter=True, weighted=True, biased=True, dtype=F16)
GATED = replace(GATHERED, n=88, activation="silu")      # each half 44 columns
SCHEDULES = {"1 row": S.by(1).of(1, 2), "4 rows": S.by(4).of(2, 1), "8 rows": S.by(8).of(1, 2),
             "16 rows": S.by(16).of(2, 1), "2 splits": S.by(4).of(1, 1).split(2)}
QUICK = {"1 row": ("ragged 7",), "8 rows": ("every other",), "2 splits": ("ragged 5",)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("gpu", [AMPERE, HOPPER], ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("name", QUICK)
def test_whole_numbers_are_exact(name: str, gpu: GPU):
    for kind, one in (("MXFP4", GATHERED), ("awq g32", SCATTERED)):
        for routing in QUICK[name]:
            exact(spec_of(kind, one), SCHEDULES[name], gpu, *routings(GROUPS, ROWS)[routing])


@pytest.mark.slow
@pytest.mark.parametrize("routing", routings(GROUPS, ROWS))
def test_routings(routing: str):
    for name, schedule in SCHEDULES.items():
        for kind, one in (("MXFP4", GATHERED), ("awq g32", SCATTERED), ("int8 channel", PLAIN)):
            gpu = AMPERE if name == "4 rows" else HOPPER
            exact(spec_of(kind, one), schedule, gpu, *routings(GROUPS, ROWS)[routing])


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind == "NF4" else pytest.mark.slow)
                                  for kind in TYPES])
def test_types(kind: str):
    """Of both dtypes and architectures."""
    for dtype, gpu in ((BF16, HOPPER), (F16, AMPERE)):
        one = replace(PLAIN, dtype=dtype, k=768 if kind == "Q4_K" else 608)
        for schedule in (SCHEDULES["1 row"], SCHEDULES["16 rows"]):
            near(spec_of(kind, one), schedule, gpu, RAGGED, 2)
            if kind not in ROUNDED: exact(spec_of(kind, one), schedule, gpu, RAGGED, 2)


@pytest.mark.slow
@each_activation
def test_activations(activation: str):
    one = replace(GATED, activation=activation)
    for name in ("1 row", "8 rows"): near(spec_of("MXFP4", one), SCHEDULES[name], HOPPER, RAGGED, 2)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [AMPERE, HOPPER], ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("name", SCHEDULES)
def test_numbers(name: str, gpu: GPU):
    for one in (PLAIN, GATHERED, SCATTERED, GATED, replace(GATHERED, k=328)):
        near(spec_of("int4 g32" if one.k == 608 else "int8 channel", one), SCHEDULES[name], gpu, RAGGED, 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, LATE])
def test_orders_of_copies(seed: int | str):
    for schedule in SCHEDULES.values():
        for gpu in (AMPERE, HOPPER):
            exact(spec_of("MXFP4", GATHERED), schedule, gpu, RAGGED, 1, seed)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 33, 300])
def test_counts_of_groups(groups: int):
    """One; more than lanes; several for each lane."""
    one = GroupedGemmSpec(groups, 40, 32, 96, BF16)
    for routing in ("ragged 9", "all to the last", "ragged 11"):
        exact(spec_of("MXFP4", one), SCHEDULES["4 rows"], HOPPER, *routings(groups, 40)[routing])


REFUSED = {
    "tiles of 3 rows, not 1, 2, 4, 8, 16": ("MXFP4", PLAIN, S.by(3)),
    "2000 groups, at most 1024": ("MXFP4", replace(PLAIN, groups=2000), S),
    "activations of float": ("MXFP4", replace(PLAIN, dtype=dtypes.float32), S),
    "of shared memory": ("MXFP4", replace(PLAIN, k=1 << 16), S)}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str):
    kind, one, schedule = REFUSED[words]
    assert words in "; ".join(TABLE.problems(spec_of(kind, one), schedule, HOPPER))


def test_a_stack_in_rows_is_refused():
    assert "not in fragments" in TABLE.why_not(replace(spec_of("MXFP4", PLAIN), type=TYPES["MXFP4"]), HOPPER)
