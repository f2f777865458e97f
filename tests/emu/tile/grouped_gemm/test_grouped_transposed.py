"""Matrices (K, N) on the emulator, as gradients of rows have them: `grouped_transposed_wgmma` and
`grouped_transposed_mma`, integers to the bit for many routings, random numbers near float64's, orders of
asynchronous copies; what ptxas makes of them, and what is chosen."""
from __future__ import annotations

from dataclasses import replace

import pytest
from tinygrad.dtype import dtypes

from tests.support.tile.grouped_case import built, exact, given, launched, near, routings
from tinygrad_nv.ptx.assemble import assemble, find_program
from tinygrad_nv.ptx.emulator import LATE
from tinygrad_nv.tile.grouped_gemm.mma.plan import candidates_transposed
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedTransposedMma, GroupedTransposedWgmma
from tinygrad_nv.tile.grouped_gemm.spec import TransposedGroupedSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BF16, F16, W, M = dtypes.bfloat16, dtypes.float16, GroupedTransposedWgmma(), GroupedTransposedMma()
HOPPER, AMPERE = GPU("sm_90a", 4), GPU("sm_80", 4)
GROUPS, ROWS, STAGES = 5, 150, 6
# K has two stages more than the deepest ring; columns end within a tile
PLAIN = TransposedGroupedSpec(GROUPS, ROWS, 136, 64 * STAGES, BF16)
GATHERED = replace(PLAIN, sources=75, gather=2, biased=True, k=64 * (STAGES - 1) + 8)
SCATTERED = replace(PLAIN, scatter=True, weighted=True, biased=True, dtype=F16)
GATED = replace(GATHERED, n=176, activation="silu")
ODD = replace(GATHERED, n=37, k=64 * (STAGES - 1) + 5)      # elements one by one
SCHEDULES = {
    "wgmma, 128 rows": W.block(128, 128).stages(3), "wgmma, ping-pong": W.block(64, 128).pingpong().stages(4),
    "wgmma, 256 rows": W.block(256, 64).stages(3), "wgmma, one consumer": W.block(64, 96).warps(8).stages(4),
    "wgmma, 8 columns": W.block(128, 8).swap_operands(), "wgmma, 64 columns": W.block(128,
                                                                                      64).swap_operands(),
    "wgmma, swapped ping-pong": W.block(64, 32).pingpong().swap_operands(),
    "mma, 128 rows": M.block(128, 64).k(32).warps(2, 2).stages(3),
    "mma, 16 rows": M.block(16, 64).k(32).warps(1, 2).stages(3)}
SPECS = {name: (PLAIN, GATHERED, SCATTERED) if name.startswith("wgmma") else (GATHERED, SCATTERED, GATED, ODD)
         for name in SCHEDULES}
CASES = [(name, spec) for name, schedule in SCHEDULES.items() for spec in SPECS[name]
         if not TABLE.problems(spec, schedule, HOPPER)]
IDS = [f"{name}, {spec}" for name, spec in CASES]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "spec"), CASES, ids=IDS)
def test_integers_are_exact(name: str, spec: TransposedGroupedSpec):
    if spec.activation: return near(built(spec, SCHEDULES[name], HOPPER), spec, [70, 0, 17, 60, 1], 2)
    for routing in ("ragged 7", "every other"):
        exact(built(spec, SCHEDULES[name], HOPPER), spec, *routings(GROUPS, ROWS)[routing])


@pytest.mark.slow
@pytest.mark.parametrize("routing", routings(GROUPS, ROWS))
def test_routings(routing: str):
    assert len(routings(GROUPS, ROWS)) >= 40
    for name, spec in CASES:
        if not spec.activation:
            exact(built(spec, SCHEDULES[name], HOPPER), spec, *routings(GROUPS, ROWS)[routing])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "spec"), CASES, ids=IDS)
def test_numbers(name: str, spec: TransposedGroupedSpec):
    near(built(spec, SCHEDULES[name], HOPPER), spec, [60, 0, 30, 50, 3], 3)
    if name.startswith("mma"):
        near(built(spec, SCHEDULES[name], AMPERE), spec, [60, 0, 30, 50, 3], 3, arch="sm_80")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, LATE])
def test_orders_of_copies(seed: int | str):
    for name, spec in CASES:
        if not spec.activation:
            exact(built(spec, SCHEDULES[name], HOPPER), spec, [70, 0, 17, 60, 1], 1, seed=seed)


def test_no_bank_conflicts_in_main_loops():
    """Sums are written in any case."""
    held = given(GATHERED, [70, 0, 17, 60, 1], integers=True)
    report = launched(built(GATHERED, SCHEDULES["mma, 128 rows"], HOPPER), GATHERED, held)[1]
    assert sum(report.stats.bank_conflicts.values()) == 0


LARGE = TransposedGroupedSpec(8, 8192, 4096, 14336, BF16, biased=True)


@pytest.mark.sampled(2)
@pytest.mark.skipif(find_program("ptxas") is None, reason="needs ptxas")
@pytest.mark.parametrize("schedule", [s for s in candidates_transposed(LARGE, AMPERE)
                                      if not TABLE.problems(LARGE, s, AMPERE)], ids=str)
def test_no_candidate_spills(schedule: GroupedTransposedMma):
    """Those with wgmma are in test_grouped_resources.py."""
    kernel = assemble(TABLE.build(LARGE, schedule, AMPERE).ptx, "sm_80").kernels[schedule.template]
    assert kernel.spill_store_bytes == kernel.spill_load_bytes == 0


def test_defaults():
    """wgmma where there is one and rows are aligned, else mma.sync, which takes any extents."""
    for spec, arch, kind in ((LARGE, "sm_90a", GroupedTransposedWgmma),
                             *((spec, arch, GroupedTransposedMma) for spec, arch in (
                                 (LARGE, "sm_80"), (ODD, "sm_90a"), (GATED, "sm_90a")))):
        found = TABLE.choose(spec, GPU(arch, 132))
        assert isinstance(found, kind)
        assert TABLE.read("gpu", found.to_json()) == found


def test_refused():
    assert "gate and up of matrices (K, N)" in TABLE.problems(GATED, W, HOPPER)
    assert TABLE.choose(replace(PLAIN, dtype=dtypes.float32), HOPPER) is None
