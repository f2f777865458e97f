"""quant_grouped_mma on the emulator: whole numbers to the bit for many routings, random numbers near
float64's, types, orders of copies."""
from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.tile.grouped_case import routings
from tests.support.tile.quant_grouped_case import (
    BF16,
    F16,
    ROUNDED,
    TYPES,
    each_activation,
    exact,
    near,
    reported,
    spec_of,
)
from tinygrad_nv.ptx.emulator import LATE
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedMma
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

S = QuantGroupedMma().k(64)
AMPERE, ADA, HOPPER = GPU("sm_80", 4), GPU("sm_89", 4), GPU("sm_90a", 4)
GROUPS, ROWS, STAGES = 5, 150, 5
RAGGED = [70, 0, 17, 60, 1]
# K has two stages more than the deepest ring; columns end within a tile
PLAIN = GroupedGemmSpec(GROUPS, ROWS, 72, 64 * STAGES, BF16)
GATHERED = replace(PLAIN, sources=75, gather=2, biased=True, k=64 * STAGES + 40)
SCATTERED = replace(PLAIN, scatter=True, weighted=True, biased=True, dtype=F16)
GATED = replace(GATHERED, n=136, activation="silu")         # each half 68 columns
SCHEDULES = {"128 rows": S.block(128, 64).warps(2, 2).stages(3),
             "64 rows": S.block(64, 64).warps(2, 2).stages(2),
             "16 rows": S.block(16, 64).warps(1, 2).stages(3),
             "32 rows": S.block(32, 32).warps(1, 1).stages(2)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "routing"), [("64 rows", "ragged 7"), ("16 rows", "every other")])
def test_whole_numbers_are_exact(name: str, routing: str):
    for kind, one in (("MXFP4", GATHERED), ("awq g32", SCATTERED)):
        exact(spec_of(kind, one), SCHEDULES[name], AMPERE, *routings(GROUPS, ROWS)[routing])


@pytest.mark.slow
@pytest.mark.parametrize("routing", routings(GROUPS, ROWS))
def test_routings(routing: str):
    for name in ("128 rows", "64 rows", "16 rows"):
        for kind, one in (("MXFP4", GATHERED), ("awq g32", SCATTERED)):
            exact(spec_of(kind, one), SCHEDULES[name], AMPERE, *routings(GROUPS, ROWS)[routing])


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_types(kind: str):
    """Of both dtypes and all architectures."""
    for dtype, gpu in ((BF16, HOPPER), (F16, AMPERE), (BF16, ADA)):
        one = replace(PLAIN, dtype=dtype, k=512 if kind in ("Q4_K", "awq", "e4m3 g128") else PLAIN.k)
        schedule = SCHEDULES["16 rows"].k(32 if kind == "int8 channel" else 64)
        near(spec_of(kind, one), schedule, gpu, RAGGED, 2)
        if kind not in ROUNDED: exact(spec_of(kind, one), schedule, gpu, RAGGED, 2)


@pytest.mark.slow
@each_activation
def test_activations(activation: str):
    one = replace(GATED, activation=activation)
    near(spec_of("MXFP4", one), SCHEDULES["64 rows"], AMPERE, RAGGED, 2)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [AMPERE, HOPPER], ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("name", SCHEDULES)
def test_numbers(name: str, gpu: GPU):
    for one in (PLAIN, GATHERED, SCATTERED, GATED, replace(GATHERED, k=330)):
        near(spec_of("int4 g32", one), SCHEDULES[name], gpu, RAGGED, 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, LATE])
def test_orders_of_copies(seed: int | str):
    for schedule in SCHEDULES.values():
        for gpu in (AMPERE, HOPPER): exact(spec_of("MXFP4", GATHERED), schedule, gpu, RAGGED, 1, seed)


def test_no_bank_conflicts():
    found = reported(spec_of("MXFP4", GATHERED), SCHEDULES["64 rows"], AMPERE, RAGGED)
    assert sum(found.stats.bank_conflicts.values()) == 0


REFUSED = {
    "2000 groups, at most 1024": (replace(PLAIN, groups=2000), S), "splits": (PLAIN, S.split(2)),
    "block_m=24 is not a multiple": (PLAIN, S.block(24, 64)), "multiple of the unit's 64": (PLAIN, S.k(32)),
    "no multiple of block_k=128": (PLAIN, S.k(128))}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str):
    one, schedule = REFUSED[words]
    assert words in "; ".join(TABLE.problems(spec_of("MXFP4", one), schedule, AMPERE))
