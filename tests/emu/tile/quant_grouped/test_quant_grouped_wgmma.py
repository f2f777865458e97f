"""quant_grouped_wgmma on the emulator: whole numbers to the bit for many routings, random numbers near
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
    reported,
    spec_of,
)
from tinygrad_nv.ptx.emulator import LATE
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedWgmma
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

S = QuantGroupedWgmma().warps(12)
HOPPER = GPU("sm_90a", 4)
GROUPS, ROWS, STAGES = 5, 150, 6
RAGGED = [70, 0, 17, 60, 1]
# K has two stages more than the deepest ring; columns end within a tile of 16, and within one of a CTA
PLAIN = GroupedGemmSpec(GROUPS, ROWS, 152, 64 * STAGES, BF16)
GATHERED = replace(PLAIN, sources=75, gather=2, biased=True, k=64 * (STAGES - 1) + 40)
SCATTERED = replace(PLAIN, scatter=True, weighted=True, biased=True, dtype=F16)
GATED = replace(GATHERED, n=304, activation="silu")         # each half 152 columns
SCHEDULES = {"8 rows": S.block(128, 8).stages(4), "24 rows": S.block(128, 24).stages(3),
             "64 rows": S.block(256, 64).stages(4), "112 rows": S.block(256, 112).stages(2),
             "192 rows": S.block(128, 192).stages(3), "one consumer": S.block(64, 32).warps(8).stages(4),
             "three consumers": S.block(192, 40).k(128).warps(16).stages(2),
             "ping-pong": S.block(128, 16).pingpong().stages(4)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "routing", "kind", "one"), [
    ("64 rows", "ragged 7", "MXFP4", GATHERED), ("8 rows", "every other", "awq g32", SCATTERED)])
def test_whole_numbers_are_exact(name: str, routing: str, kind: str, one: GroupedGemmSpec):
    exact(spec_of(kind, one), SCHEDULES[name], HOPPER, *routings(GROUPS, ROWS)[routing])


@pytest.mark.slow
@pytest.mark.parametrize("routing", routings(GROUPS, ROWS))
def test_routings(routing: str):
    assert len(routings(GROUPS, ROWS)) >= 40
    for name, schedule in SCHEDULES.items():
        for kind, one in (("MXFP4", GATHERED), ("awq g32", SCATTERED), ("int8 channel", PLAIN)):
            if TABLE.problems(spec_of(kind, one), schedule, HOPPER):    # boxes of 128 columns of bytes
                assert (name, kind) == ("three consumers", "int8 channel")
            else: exact(spec_of(kind, one), schedule, HOPPER, *routings(GROUPS, ROWS)[routing])


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_types(kind: str):
    """Of both dtypes."""
    for dtype in (BF16, F16):
        one = replace(PLAIN, dtype=dtype, k=512 if kind == "Q4_K" else PLAIN.k)
        for name in ("24 rows", "one consumer"):
            near(spec_of(kind, one), SCHEDULES[name], HOPPER, RAGGED, 2)
            if kind not in ROUNDED: exact(spec_of(kind, one), SCHEDULES[name], HOPPER, RAGGED, 2)


@pytest.mark.slow
@each_activation
def test_activations(activation: str):
    """Of three consumers, each with columns of gate and of up."""
    one = replace(GATED, activation=activation)
    near(spec_of("MXFP4", one), S.block(384, 16).k(128).warps(16).stages(2), HOPPER, RAGGED, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_numbers(name: str):
    for one in (PLAIN, GATHERED, SCATTERED, replace(GATHERED, k=328)):
        near(spec_of("int4 g32", one), SCHEDULES[name], HOPPER, RAGGED, 2)
    for kind in ("int4 g32", "int8 channel"):
        for columns, warps in ((256, 12), (384, 16)):
            near(spec_of(kind, GATED), S.block(columns, 24).warps(warps).stages(3), HOPPER, RAGGED, 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, LATE])
def test_orders_of_copies(seed: int | str):
    for schedule in SCHEDULES.values():
        for kind, one in (("MXFP4", GATHERED), ("awq g32", SCATTERED)):
            exact(spec_of(kind, one), schedule, HOPPER, RAGGED, 1, seed)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 33, 300])
def test_counts_of_groups(groups: int):
    """One; more than lanes; several for each lane."""
    one = GroupedGemmSpec(groups, 40, 64, 320, BF16)
    for routing in ("ragged 9", "all to the last", "ragged 11"):
        exact(spec_of("MXFP4", one), SCHEDULES["one consumer"].stages(3), HOPPER,
              *routings(groups, 40)[routing])


def test_no_bank_conflict_in_the_main_loop():
    found = reported(spec_of("MXFP4", GATHERED), SCHEDULES["64 rows"], HOPPER, RAGGED)
    assert sum(found.stats.bank_conflicts.values()) == 0


REFUSED = {
    "sm_90a, the target is sm_80": (PLAIN, S, "sm_80"),
    "activations of float": (replace(PLAIN, dtype=dtypes.float32), S, "sm_90a"),
    "2000 groups, at most 1024": (replace(PLAIN, groups=2000), S, "sm_90a"),
    "rows as the left operand": (PLAIN, replace(S, swap=False), "sm_90a"),
    "64 columns of gate and up for a consumer": (GATED, S.block(128, 16), "sm_90a"),
    "224 gathered rows of a tile, at most 192": (GATHERED, S.block(128, 224).stages(2), "sm_90a"),
    "a stage has rows of 128 B or 256 B": (PLAIN, S.k(192), "sm_90a"),
    "128 rows of tiles that are stored in turns": (PLAIN, S.block(256, 128).stages(2), "sm_90a"),
    "of shared memory, sm_90a has": (PLAIN, S.block(256, 64).k(128).stages(8), "sm_90a")}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str):
    one, schedule, arch = REFUSED[words]
    assert words in "; ".join(TABLE.problems(spec_of("MXFP4", one), schedule, GPU(arch)))
