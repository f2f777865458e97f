"""grouped_scaled_wgmma on the emulator: 8-bit floats with scales of groups of K."""
from __future__ import annotations

from dataclasses import replace

import pytest
from tinygrad.dtype import dtypes

from tests.support.tile.grouped_case import built, exact, near, routings
from tinygrad_nv.errors import SpecError
from tinygrad_nv.ptx.emulator import LATE
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedScaledWgmma
from tinygrad_nv.tile.grouped_gemm.spec import ScaledGroupedGemmSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

S, HOPPER = GroupedScaledWgmma(), GPU("sm_90a", 4)
GROUPS, ROWS = 5, 150
# columns end within a tile and within a scale, K within a group
PLAIN = ScaledGroupedGemmSpec(GROUPS, ROWS, 160, 128 * 6 - 48)
GATHERED = replace(PLAIN, sources=75, gather=2)
GATED = replace(GATHERED, n=256, activation="silu")
SCATTERED = replace(PLAIN, scatter=True, weighted=True, biased=True, result=dtypes.float16)
SCHEDULES = {
    "128 rows": S.block(128, 128).stages(3), "ping-pong": S.block(64, 128).pingpong().stages(4),
    "one consumer": S.block(64, 64).warps(8).stages(4), "8 columns": S.block(128,
                                                                             8).swap_operands().stages(4),
    "24 columns": S.block(128, 24).swap_operands().stages(4),
         "64 columns": S.block(128, 64).swap_operands().stages(4)}
QUICK = {"128 rows": "ragged 7", "ping-pong": "every other", "8 columns": "ragged 2"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", QUICK)
def test_integers_are_exact(name: str):
    for spec in (GATHERED, SCATTERED):
        exact(built(spec, SCHEDULES[name], HOPPER), spec, *routings(GROUPS, ROWS)[QUICK[name]])


@pytest.mark.slow
@pytest.mark.parametrize("routing", routings(GROUPS, ROWS))
def test_routings(routing: str):
    for schedule in SCHEDULES.values():
        for spec in (PLAIN, GATHERED, SCATTERED):
            exact(built(spec, schedule, HOPPER), spec, *routings(GROUPS, ROWS)[routing])


def test_gate_and_up():
    for schedule in (S.block(64, 128).pingpong().stages(4), S.block(256, 16).swap_operands().stages(4)):
        near(built(GATED, schedule, HOPPER), GATED, [20, 0, 7, 17, 1], 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, LATE])
def test_numbers_in_orders_of_copies(seed: int | str):
    for schedule in SCHEDULES.values():
        for spec in (GATHERED, SCATTERED):
            near(built(spec, schedule, HOPPER), spec, [60, 0, 30, 50, 3], 3, seed=seed)


REFUSED = {
    "96 columns of a tile do not divide": (PLAIN, S.block(128, 96)),
    "96 rows with a scale each": (PLAIN, S.block(128, 96).swap_operands()),
    "up begins at column 80": (replace(GATED, n=160), S.block(128, 128).stages(3)),
    "results of float": (replace(PLAIN, result=dtypes.float32), S)}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str):
    assert words in "; ".join(TABLE.problems(*REFUSED[words], GPU("sm_90a")))


def test_refused_specs():
    with pytest.raises(SpecError, match="elements of bf16"): replace(PLAIN, dtype=dtypes.bfloat16)
    with pytest.raises(SpecError, match="results of e4m3"): replace(PLAIN, result=dtypes.fp8e4m3)


def test_a_schedule_is_chosen():
    for rows, swapped in ((64, True), (32768, False)):
        spec = ScaledGroupedGemmSpec(64, rows, 4096, 7168, sources=rows // 8, gather=8, activation="silu")
        found = TABLE.choose(spec, GPU("sm_90a", 132))
        assert isinstance(found, GroupedScaledWgmma)
        assert found.swap == swapped
        assert TABLE.read("gpu", found.to_json()) == found
