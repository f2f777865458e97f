"""grouped_mma on the emulator: integers to the bit for many routings, random numbers near float64's, orders
of copies; and what ptxas makes of it."""
from __future__ import annotations

from dataclasses import replace

import pytest
from tinygrad.dtype import dtypes

from tests.support.cpu.cpu_grouped_case import given
from tests.support.tile.grouped_case import built, exact, launched, near, routings
from tinygrad_nv.ptx.assemble import assemble, find_program
from tinygrad_nv.ptx.emulator import LATE
from tinygrad_nv.tile.grouped_gemm.mma.plan import candidates
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedMma
from tinygrad_nv.tile.grouped_gemm.spec import ACTIVATIONS, GroupedGemmSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BF16, F16, S = dtypes.bfloat16, dtypes.float16, GroupedMma()
AMPERE, GPUS = GPU("sm_80", 4), (GPU("sm_80", 4), GPU("sm_89", 4), GPU("sm_90a", 4))
GROUPS, ROWS, STAGES = 5, 150, 5
# K has two stages more than the deepest ring; columns end within a tile
PLAIN = GroupedGemmSpec(GROUPS, ROWS, 72, 32 * STAGES, BF16)
GATHERED = replace(PLAIN, sources=75, gather=2, biased=True, k=32 * (STAGES - 1) + 8)
SCATTERED = replace(PLAIN, scatter=True, weighted=True, biased=True, dtype=F16)
GATED = replace(GATHERED, n=176, activation="silu")
ODD = replace(GATHERED, n=37, k=32 * (STAGES - 1) + 5)      # elements one by one
SCHEDULES = {"128 rows": S.block(128, 64).k(32).warps(2, 2).stages(3),
             "64 rows": S.block(64, 64).k(32).warps(2, 2).stages(2),
             "16 rows": S.block(16, 64).k(32).warps(1, 2).stages(3),
             "32 rows": S.block(32, 32).k(32).warps(1, 1).stages(2)}
QUICK = {"128 rows": ("ragged 7",), "16 rows": ("every other",)}
SPECS = (PLAIN, GATHERED, SCATTERED, GATED, ODD)


@pytest.mark.parametrize("name", QUICK)
def test_integers_are_exact(name: str):
    for spec in (GATHERED, SCATTERED):
        for routing in QUICK[name]:
            exact(built(spec, SCHEDULES[name], AMPERE), spec, *routings(GROUPS, ROWS)[routing], arch="sm_80")


@pytest.mark.slow
@pytest.mark.parametrize("routing", routings(GROUPS, ROWS))
def test_routings(routing: str):
    assert len(routings(GROUPS, ROWS)) >= 40
    for name in ("128 rows", "64 rows", "16 rows"):
        for spec in (PLAIN, GATHERED, SCATTERED):
            exact(built(spec, SCHEDULES[name], AMPERE), spec, *routings(GROUPS, ROWS)[routing], arch="sm_80")


@pytest.mark.parametrize("activation", ["silu", *(pytest.param(each, marks=pytest.mark.slow)
                                                  for each in ACTIVATIONS[2:])])
def test_activations(activation: str):
    spec = replace(GATED, activation=activation)
    near(built(spec, SCHEDULES["64 rows"], AMPERE), spec, [70, 0, 17, 60, 1], 2, arch="sm_80")


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("name", SCHEDULES)
def test_numbers(name: str, gpu: GPU):
    for spec in SPECS: near(built(spec, SCHEDULES[name], gpu), spec, [60, 0, 30, 50, 3], 3, arch=gpu.arch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, LATE])
def test_orders_of_copies(seed: int | str):
    for name in SCHEDULES:
        for spec in (GATHERED, SCATTERED):
            exact(built(spec, SCHEDULES[name], AMPERE), spec, [70, 0, 17, 60, 1], 1, "sm_80", seed)


def test_no_bank_conflicts():
    held = given(GATHERED, [70, 0, 17, 60, 1], integers=True)
    report = launched(built(GATHERED, SCHEDULES["64 rows"], AMPERE), GATHERED, held, "sm_80")[1]
    assert sum(report.stats.bank_conflicts.values()) == 0


@pytest.mark.sampled(1)
@pytest.mark.skipif(find_program("ptxas") is None, reason="needs ptxas")
@pytest.mark.parametrize("activation", ["", "silu"])
def test_no_candidate_spills(activation: str):
    """The largest of the tiles, which have the most sums."""
    spec = GroupedGemmSpec(8, 4096, 4096, 1024, BF16, 2048, 2, activation=activation, biased=True)
    for schedule in candidates(spec, AMPERE)[:2]:
        if TABLE.problems(spec, schedule, AMPERE): continue
        found = assemble(TABLE.build(spec, schedule, AMPERE).ptx, "sm_80").kernels["grouped_mma"]
        assert found.spill_store_bytes == found.spill_load_bytes == 0, str(schedule)


def test_of_many_rows_it_is_the_default():
    for arch in ("sm_80", "sm_89"):
        spec = GroupedGemmSpec(8, 8192, 28672, 4096, BF16, 4096, 2, activation="silu")
        found = TABLE.choose(spec, GPU(arch))
        assert isinstance(found, GroupedMma)
        assert TABLE.read("gpu", found.to_json()) == found


REFUSED = {
    "float without tf32": (replace(PLAIN, dtype=dtypes.float32), S.k(16)),
    "2000 groups, at most 1024": (replace(PLAIN, groups=2000), S),
    "splits, or the transposed matmul": (PLAIN, S.split(2)),
    "block_m=24 is not a multiple": (PLAIN, S.block(24, 64))}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str):
    spec, schedule = REFUSED[words]
    assert words in "; ".join(TABLE.problems(spec, schedule, AMPERE))
