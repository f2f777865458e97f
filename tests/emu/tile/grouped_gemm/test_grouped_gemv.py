"""grouped_gemv on the emulator: integers to the bit for many routings, random numbers near float64's, orders
of copies; and what ptxas makes of it."""
from __future__ import annotations

from dataclasses import replace

import pytest
from tinygrad.dtype import dtypes

from tests.support.cpu.cpu_grouped_case import given
from tests.support.tile.grouped_case import built, exact, launched, near, routings
from tinygrad_nv.ptx.assemble import assemble, find_program
from tinygrad_nv.ptx.emulator import LATE
from tinygrad_nv.tile.grouped_gemm.gemv.plan import candidates, cost
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedGemv
from tinygrad_nv.tile.grouped_gemm.spec import ACTIVATIONS, GroupedGemmSpec
from tinygrad_nv.tile.lora.spec import LoraShrinkSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BF16, F16, F32, S = dtypes.bfloat16, dtypes.float16, dtypes.float32, GroupedGemv(warps_m=2)
GPUS = GPU("sm_80", 4), GPU("sm_90a", 4)
GROUPS, ROWS = 5, 50
# K has four iterations of a warp and a tail; columns end within a tile
PLAIN = GroupedGemmSpec(GROUPS, ROWS, 36, 2 * 4 * 128 + 40, BF16)
GATHERED = replace(PLAIN, sources=25, gather=2, biased=True)
SCATTERED = replace(PLAIN, scatter=True, weighted=True, biased=True, dtype=F16)
GATED = replace(GATHERED, n=88, activation="silu")
WIDE = replace(SCATTERED, dtype=F32, k=500)
ODD = replace(GATHERED, k=165, dtype=F16)     # elements one by one
SCHEDULES = {
    "1 row": replace(S, rows=1, block_n=8, block_k=256), "2 rows": replace(S, rows=2, block_n=32),
    "8 rows": replace(S, rows=8, block_n=16), "16 rows": replace(S, rows=16, block_n=32, block_k=64),
    "2 splits": replace(S, rows=4, block_n=32, splits=2)}
QUICK = {"1 row": ("ragged 7",), "8 rows": ("every other",), "2 splits": ("ragged 5",)}
SPECS = (PLAIN, GATHERED, SCATTERED, GATED, WIDE, ODD)


def fitting(spec: GroupedGemmSpec, name: str) -> GroupedGemv:
    """The schedule, of float32 and few rows with warps that have less of K."""
    made = SCHEDULES[name]
    if spec.dtype == F32: made = replace(made, block_k=128 if made.rows < 8 else 32)
    return made


@pytest.mark.sampled(3)
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("name", QUICK)
def test_integers_are_exact(name: str, gpu: GPU):
    for spec in (GATHERED, SCATTERED):
        for routing in QUICK[name]:
            exact(built(spec, SCHEDULES[name], gpu), spec, *routings(GROUPS, ROWS)[routing], arch=gpu.arch)


@pytest.mark.slow
@pytest.mark.parametrize("routing", routings(GROUPS, ROWS))
def test_routings(routing: str):
    for name in SCHEDULES:
        for spec in (PLAIN, GATHERED, SCATTERED):
            for gpu in GPUS:
                made = built(spec, SCHEDULES[name], gpu)
                exact(made, spec, *routings(GROUPS, ROWS)[routing], arch=gpu.arch)


def test_routings_are_many():
    """Beside those of tiles of 64 and 128 rows."""
    assert len(routings(GROUPS, ROWS)) >= 30
    assert len(routings(GROUPS, 150)) >= 40


@pytest.mark.parametrize("groups", [1, 33, pytest.param(300, marks=pytest.mark.slow)])
def test_counts_of_groups(groups: int):
    """One; more than lanes; several for each lane."""
    spec = GroupedGemmSpec(groups, 40, 32, 264, BF16)
    for routing in ("ragged 9", "all to the last", "ragged 11"):
        exact(built(spec, replace(S, rows=4, block_n=16), GPUS[1]), spec, *routings(groups, 40)[routing])


@pytest.mark.parametrize("activation", ["silu", *(pytest.param(each, marks=pytest.mark.slow)
                                                  for each in ACTIVATIONS[2:])])
def test_activations(activation: str):
    spec = replace(GATED, activation=activation)
    for name in ("1 row", "8 rows"): near(built(spec, SCHEDULES[name], GPUS[1]), spec, [20, 0, 7, 20, 1], 2)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("name", SCHEDULES)
def test_numbers(name: str, gpu: GPU):
    for spec in SPECS:
        schedule = fitting(spec, name)
        if TABLE.problems(spec, schedule, gpu): assert spec == WIDE
        else: near(built(spec, schedule, gpu), spec, [20, 0, 9, 11, 3], 3, arch=gpu.arch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, LATE])
def test_orders_of_copies(seed: int | str):
    for name in SCHEDULES:
        for gpu in GPUS:
            exact(built(GATHERED, SCHEDULES[name], gpu), GATHERED, [20, 0, 7, 20, 1], 1, gpu.arch, seed)


@pytest.mark.parametrize("gpu", [GPU("sm_90a", 132), GPU("sm_80", 108)], ids=lambda gpu: gpu.arch)
def test_few_ctas_share_sums(gpu: GPU):
    """x Aᵀ of 8 adapters of rank 16: in clusters, or through the workspace; in any order of copies."""
    spec = LoraShrinkSpec(8, 8, 16, BF16, BF16, 2048).grouped_gemm
    made = TABLE.choose(spec, GPU("sm_90a", 132))
    assert isinstance(made, GroupedGemv)
    assert made.splits >= 4
    for seed, routing in ((0, [1] * 8), (1, [0, 6, 0, 1, 0, 0, 0, 0]), (LATE, [0] * 7 + [8])):
        exact(built(spec, made, gpu), spec, routing, arch=gpu.arch, seed=seed)
    near(built(spec, made, gpu), spec, [2, 0, 3, 0, 0, 1, 0, 1], arch=gpu.arch)


def test_many_ctas_share_none():
    """Experts of Qwen3-235B have more columns than there are SMs."""
    for tokens in (1, 8):
        found = candidates(layers("Qwen3-235B", tokens)[0], GPU("sm_90a", 132))
        assert {each.splits for each in found} == {1}


# **** legality and defaults ****

MODELS = {"Mixtral": (8, 2, 4096, 14336), "Qwen3-235B": (128, 8, 4096, 1536),
          "gpt-oss-20b": (32, 4, 2880, 2880)}


def layers(name: str, tokens: int) -> tuple[GroupedGemmSpec, GroupedGemmSpec]:
    """Both matmuls of a layer."""
    experts, k, hidden, width = MODELS[name]
    return (GroupedGemmSpec(experts, tokens * k, 2 * width, hidden, BF16, tokens, k, activation="silu"),
            GroupedGemmSpec(experts, tokens * k, hidden, width, BF16, scatter=True, weighted=True))


@pytest.mark.sampled(1)
@pytest.mark.skipif(find_program("ptxas") is None, reason="needs ptxas")
@pytest.mark.parametrize("name", MODELS)
def test_of_a_token_it_is_the_default_and_it_spills_nothing(name: str):
    """Of several rows of a group an H100 takes less with tensor cores' other templates."""
    assert isinstance(TABLE.choose(layers(name, 1)[0], GPU("sm_90a")), GroupedGemv)
    assert not isinstance(TABLE.choose(layers(name, 8)[0], GPU("sm_90a")), GroupedGemv)
    for arch, tokens in (("sm_90a", 1), ("sm_80", 4), ("sm_90a", 8)):
        for spec in layers(name, tokens):
            legal = [s for s in candidates(spec, GPU(arch)) if not TABLE.problems(spec, s, GPU(arch))]
            found = min(legal, key=lambda s: cost(spec, s, GPU(arch)).seconds)
            assert TABLE.read("gpu", found.to_json()) == found
            resources = assemble(TABLE.build(spec, found, GPU(arch)).ptx, arch).kernels["grouped_gemv"]
            assert resources.spill_store_bytes == resources.spill_load_bytes == 0


REFUSED = {
    "tiles of 3 rows, not 1, 2, 4, 8, 16": (PLAIN, replace(S, rows=3)),
    "2000 groups, at most 1024": (replace(PLAIN, groups=2000), replace(S, block_n=16)),
    "block_n=24 is not a multiple of the 16 columns": (PLAIN, replace(S, block_n=24)),
    "of shared memory": (replace(PLAIN, k=1 << 16), replace(S, rows=8, block_n=16))}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str):
    spec, schedule = REFUSED[words]
    assert words in "; ".join(TABLE.problems(spec, schedule, GPUS[1]))


@pytest.mark.parametrize("name", ["1 row", "8 rows"])
def test_no_bank_conflicts_before_the_epilogue(name: str):
    made = built(GATHERED, SCHEDULES[name], GPUS[1])
    report = launched(made, GATHERED, given(GATHERED, [20, 0, 7, 20, 1], integers=True))[1]
    first = made.ptx[:made.ptx.index("// sums of this warp")].count("\n") + 1
    assert all(line > first for line in report.stats.bank_conflicts)
