"""grouped_wgmma on the emulator: integers to the bit for many routings, random numbers near float64's, orders
of asynchronous copies; and what ptxas makes of it."""
from __future__ import annotations

from dataclasses import replace

import pytest
from tinygrad.dtype import dtypes

from tests.support.tile.grouped_case import built, exact, near, routings
from tinygrad_nv.ptx.emulator import LATE
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedWgmma
from tinygrad_nv.tile.grouped_gemm.spec import ACTIVATIONS, GroupedGemmSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BF16, F16, S = dtypes.bfloat16, dtypes.float16, GroupedWgmma()
HOPPER = GPU("sm_90a", 4)
GROUPS, ROWS, STAGES = 5, 150, 6
# K has two stages more than the deepest ring; columns end within a tile
PLAIN = GroupedGemmSpec(GROUPS, ROWS, 136, 64 * STAGES, BF16)
GATHERED = replace(PLAIN, sources=75, gather=2, biased=True, k=64 * (STAGES - 1) + 8)
SCATTERED = replace(PLAIN, scatter=True, weighted=True, biased=True, dtype=F16)
GATED = replace(GATHERED, n=176, activation="silu")
SCHEDULES = {
    "128 rows": S.block(128, 128).stages(3), "ping-pong": S.block(64, 128).pingpong().stages(4),
    "256 rows": S.block(256, 64).stages(3), "one consumer": S.block(64, 96).warps(8).stages(4),
    "8 columns": S.block(128, 8).swap_operands(), "24 columns": S.block(128, 24).swap_operands(),
    "64 columns": S.block(128, 64).swap_operands(),
         "swapped ping-pong": S.block(64, 32).pingpong().swap_operands()}
QUICK = {"128 rows": ("ragged 7", "every other"), "ping-pong": ("ragged 5",), "8 columns": ("ragged 2",),
         "64 columns": ("all to a middle one",)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", QUICK)
def test_integers_are_exact(name: str):
    for spec in (PLAIN, GATHERED, SCATTERED):
        for routing in QUICK[name]:
            exact(built(spec, SCHEDULES[name], HOPPER), spec, *routings(GROUPS, ROWS)[routing])


@pytest.mark.slow
@pytest.mark.parametrize("routing", routings(GROUPS, ROWS))
def test_routings(routing: str):
    assert len(routings(GROUPS, ROWS)) >= 40
    for name, schedule in SCHEDULES.items():
        for spec in (PLAIN, GATHERED, SCATTERED):
            if TABLE.problems(spec, schedule, HOPPER): assert (name, spec) == ("256 rows", GATHERED)
            else: exact(built(spec, schedule, HOPPER), spec, *routings(GROUPS, ROWS)[routing])


@pytest.mark.parametrize("groups", [1, 33, pytest.param(128, marks=pytest.mark.slow),
                                    pytest.param(300, marks=pytest.mark.slow)])
def test_counts_of_groups(groups: int):
    """One; more than lanes; several for each lane."""
    spec = GroupedGemmSpec(groups, 40, 64, 64 * 4, BF16)
    schedule = S.block(64, 16).swap_operands().warps(8).stages(2)
    for routing in ("ragged 9", "all to the last", "ragged 11"):
        exact(built(spec, schedule, HOPPER), spec, *routings(groups, 40)[routing])


@pytest.mark.parametrize("activation", ["silu", *(pytest.param(each, marks=pytest.mark.slow)
                                                  for each in ACTIVATIONS[2:])])
def test_activations(activation: str):
    spec = replace(GATED, activation=activation)
    for schedule in (S.block(64, 128).pingpong().stages(4), S.block(256, 16).swap_operands().stages(4)):
        near(built(spec, schedule, HOPPER), spec, [70, 0, 17, 60, 1], 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_numbers(name: str):
    for spec in (PLAIN, GATHERED, SCATTERED):
        if not TABLE.problems(spec, SCHEDULES[name], HOPPER):
            near(built(spec, SCHEDULES[name], HOPPER), spec, [60, 0, 30, 50, 3], 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, LATE])
def test_orders_of_copies(seed: int | str):
    for name in ("128 rows", "ping-pong", "24 columns", "swapped ping-pong"):
        for spec in (GATHERED, SCATTERED):
            exact(built(spec, SCHEDULES[name], HOPPER), spec, [70, 0, 17, 60, 1], 1, seed=seed)


# **** legality and defaults ****

REFUSED = {
    "sm_90a, the target is sm_80": (PLAIN, S, "sm_80"),
    "operands of float: float16": (replace(PLAIN, dtype=dtypes.float32), S, "sm_90a"),
    "rows of x and w have 20 × 2 B = 40 B": (replace(PLAIN, k=20), S, "sm_90a"),
    "rows of the result have 12 × 2 B": (replace(PLAIN, n=12), S, "sm_90a"),
    "2000 groups, at most 1024": (replace(PLAIN, groups=2000), S, "sm_90a"),
    "256 gathered rows of a tile, at most 192": (GATHERED, S.block(256, 64).stages(3), "sm_90a"),
    "64 columns of gate and up for a consumer": (GATED, S.block(128, 16).swap_operands(), "sm_90a"),
    "24 columns of a tile are no multiple of 16": (PLAIN, S.block(128, 24), "sm_90a"),
    "a stage has rows of 128 B": (PLAIN, S.k(32), "sm_90a"),
    "one CTA has a tile": (PLAIN, S.cluster(2), "sm_90a"),
    "8 stages ×": (PLAIN, S.block(128, 256).stages(8), "sm_90a"),
    "sums a thread, at most 200": (PLAIN, S.block(256, 256).stages(2), "sm_90a")}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str):
    spec, schedule, arch = REFUSED[words]
    assert words in "; ".join(TABLE.problems(spec, schedule, GPU(arch)))


def test_few_rows_a_group_are_columns_of_wgmma():
    gpu, (template,) = GPU("sm_90a", 132), [each for each in TABLE.templates("gpu", PLAIN)
                                            if each.name == "grouped_wgmma"]
    assert template.cost is not None
    for tokens, swapped in ((8, True), (64, True), (16384, False)):
        spec = GroupedGemmSpec(128, tokens * 8, 3072, 4096, BF16, tokens, gather=8, activation="silu")
        legal = [s for s in template.candidates(spec, gpu) if not template.problems(spec, s, gpu)]
        found = min(legal, key=lambda s: template.cost(spec, s, gpu).seconds)
        assert found.swap == swapped
        assert TABLE.read("gpu", found.to_json()) == found


def test_many_rows_a_group_are_left_to_wgmma():
    spec = GroupedGemmSpec(8, 8192, 28672, 4096, BF16, 4096, gather=2, activation="silu")
    assert isinstance(TABLE.choose(spec, GPU("sm_90a", 132)), GroupedWgmma)
