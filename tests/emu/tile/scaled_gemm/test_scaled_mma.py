"""FP8 matmuls with scales of groups by mma.sync on the emulator: exact for integers and powers of two, near
for others, in every schedule; and what ptxas and the emulator count of the loop."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tinygrad.dtype import dtypes

from tests.support.tile.gemm_case import launched, run
from tests.support.tile.scaled_gemm_case import E4M3, F32, given, near, scaled, wide
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.sass import disassemble, functions, main_loop
from tinygrad_nv.tile.expression import Apply, Constant, Load, Sum
from tinygrad_nv.tile.scaled_gemm.schedules import ScaledMma
from tinygrad_nv.tile.scaled_gemm.spec import ScaledGemmSpec
from tinygrad_nv.tile.spec_json import spec_from_json, spec_to_json
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BF16, E5M2, S = dtypes.bfloat16, dtypes.fp8e5m2, ScaledMma()
ADA = GPU("sm_89", 142)
ONE = S.block(64, 64).warps(2, 2).stages(3)
SCHEDULES = {
    "eight warps": S.block(128, 128).warps(2, 4).stages(3), "four warps": ONE,
    "six stages": S.block(32, 32).warps(1, 2).stages(6), "16 rows": S.block(16, 64).warps(1, 4).stages(4),
    "one warp": S.block(16, 16).warps(1, 1).stages(2), "swapped": S.block(128, 32).warps(4,
                                                                                         1).swap_operands(),
    "16 swapped": S.block(64, 16).warps(4, 1).swap_operands()}
SEEDS = 3


def check(spec: ScaledGemmSpec, schedule: ScaledMma, m: int | None = None, seed: int = 0) -> None:
    """Integers and powers of two come out exactly."""
    held = given(spec, seed)
    got = run(TABLE.build(spec, schedule, ADA), spec, held, "sm_89", seed, m)
    left, right = wide(spec, held)
    assert torch.equal(got, (left @ right.T)[:m])


@pytest.mark.parametrize("name", SCHEDULES)
def test_integers_are_exact(name: str):
    """Odd rows and columns, K that ends within a group, as many groups as stages and two more at least."""
    schedule = SCHEDULES[name]
    spec = scaled(45, 151, 128 * (schedule.depth + 3) - 48)
    assert spec.groups >= schedule.depth + 2
    check(spec, schedule)


@pytest.mark.parametrize("seed", range(1, 1 + SEEDS))
def test_integers_are_exact_in_any_order_of_copies(seed: int):
    """A seed of the emulator ends copies as late as may be, and runs warps in another order."""
    for name in ("four warps", "16 rows"): check(scaled(40, 72, 128 * 6), SCHEDULES[name], seed=seed)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 128), (3, 130, 16), (65, 257, 144), (70, 40, 1280)])
def test_extents(m: int, n: int, k: int):
    for name in ("four warps", "swapped"): check(scaled(m, n, k), SCHEDULES[name])


def test_columns_that_no_copy_of_16_bytes_fits():
    spec = scaled(20, 24, 300)
    for pitch in (300, 303):
        check(replace(spec, a=replace(spec.a, mn=pitch), b=replace(spec.b, mn=pitch)), ONE)


@pytest.mark.parametrize("splits", [2, 3, 5])
def test_splits(splits: int):
    check(scaled(30, 70, 128 * 5), ONE.split(splits))


@pytest.mark.parametrize("m", [1, 70, 140])
def test_symbolic_rows(m: int):
    check(scaled(140, 72, 512, symbolic=True), SCHEDULES["four warps"], m)


@pytest.mark.parametrize("name", ["four warps", "swapped"])
def test_scales_of_other_strides(name: str):
    check(scaled(70, 130, 400, along_m=True), SCHEDULES[name])


@pytest.mark.parametrize("rows", [1, 16, 32, 64, 256, 300])
def test_blocks_of_rows(rows: int):
    """A scale of each, several of a warp, one of several tiles, one of all."""
    for name in ("four warps", "swapped"): check(scaled(70, 300, 400, rows=rows), SCHEDULES[name])


def test_other_operands():
    """e5m2 beside e4m3, and operands whose rows lie side by side."""
    spec = scaled(40, 48, 400)
    check(replace(spec, b=replace(spec.b, dtype=E5M2)), ONE)
    check(replace(spec, a=replace(spec.a, mn=1, k=48), b=replace(spec.b, mn=1, k=64)), ONE)


@pytest.mark.parametrize("name", ["four warps", "swapped"])
def test_others_are_as_near_as_sums_of_128(name: str): near(scaled(70, 130, 1100), SCHEDULES[name], ADA)


def test_groups_are_added_up_in_float32():
    """A first group of 2^14, then of 1 each, which a sum on the tensor core would cut off."""
    spec = scaled(16, 16, 128 * 9)
    held = given(spec)
    held["a"].fill_(0.0)
    held["b"].fill_(1.0)
    for scale in ("a_scale", "b_scale"): held[scale].fill_(1.0)
    a = held["a"].view(16, spec.k)
    a[:, :64], a[:, 128::128] = 256.0, 1.0
    got = run(TABLE.build(spec, ONE, ADA), spec, held, "sm_89")
    assert (got == 64 * 256 + 8).all()


@pytest.mark.parametrize("name", ["four warps", "swapped"])
def test_an_epilogue(name: str):
    spec = scaled(70, 136, 640, BF16)
    spec = replace(spec, epilogue=(Sum() + Load(0, F32, 0, 1)).cast(BF16))
    held = given(spec)
    held["x0"] = torch.arange(136.0)
    left, right = wide(spec, held)
    got = run(TABLE.build(spec, SCHEDULES[name], ADA), spec, held, "sm_89")
    assert torch.equal(got, (left @ right.T + held["x0"].double()).to(torch.bfloat16).double())


def test_a_static_scale_makes_codes_in_the_epilogue():
    spec = scaled(40, 80, 640, E4M3)
    spec = replace(spec, epilogue=Apply("div", (Sum(), Constant(48.0)), F32).cast(E4M3))
    held = given(spec)
    left, right = wide(spec, held)
    got = run(TABLE.build(spec, ONE, ADA), spec, held, "sm_89")
    exact = ((left @ right.T).float() / 48).clamp(-448, 448).to(torch.float8_e4m3fn).double()
    assert torch.equal(got, exact)


def test_a_schedule_is_chosen_for_many_rows_and_for_few():
    for m, n, k in ((4096, 4096, 4096), (1, 4096, 4096), (24, 7168, 2048), (300, 576, 7168), (64, 24, 80)):
        spec = scaled(m, n, k, BF16)
        found = TABLE.choose(spec, ADA)
        assert isinstance(found, ScaledMma)
        assert spec_from_json(spec_to_json(spec)) == spec
        assert TABLE.read("gpu", found.to_json()) == found
        assert found.block_m <= max(16, 2 * m)
    tried = TABLE.family("gpu", ScaledGemmSpec).candidates(scaled(64, 1024, 1024, BF16), ADA, 6)
    assert len(tried) > 3
    assert all(isinstance(each, ScaledMma) for each in tried)


REFUSED = {"a stage is a group of 128": (ONE.k(64), 128), "on sm_89 alone, this is sm_90a": (ONE, 128),
           "B of shared memory, sm_89 has": (S.block(128, 128).warps(2, 4).stages(4), 128),
           "sums a thread, at most 64": (S.block(128, 128).warps(2, 2).stages(2), 128),
           "1 or a multiple of 8": (ONE, 20), "neither divides the other": (ONE, 96),
           "4 splits of 3 groups": (ONE.split(4), 128)}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_schedules(words: str):
    schedule, rows = REFUSED[words]
    spec = scaled(256, 256, 384, rows=rows)
    assert words in "; ".join(TABLE.problems(spec, schedule, GPU("sm_90a" if "sm_90a" in words else "sm_89")))


def test_refused_specs():
    assert "8-bit floats as they are on sm_89 alone, this is sm_80" in \
        TABLE.why_not(scaled(64, 64, 256), GPU("sm_80"))
    assert "no whole groups" in str(TABLE.problems(scaled(9, 9, 300), ONE.split(2), ADA))
    assert TABLE.problems(scaled(9, 9, 300, symbolic=True), ONE.swap_operands(),
                          ADA) == ["swap of symbolic rows"]


# **** what ptxas and the emulator count ****

TILES = TABLE.find_template("gpu", "scaled_mma").candidates(scaled(4096, 4096, 4096), ADA)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", [
    pytest.param(s, id=str(s), marks=[] if i in (0, 6) else pytest.mark.slow) for i, s in enumerate(TILES)])
def test_sums_of_groups_are_added_behind_mmas(schedule: ScaledMma):
    """Nothing spills, however few groups there are, and sums of a warp with several rows are added up while
    others are still multiplied."""
    spec = scaled(4096, 4096, 1024, BF16)
    assert not TABLE.problems(spec, schedule, ADA)
    made = TABLE.build(spec, schedule, ADA)
    found = assemble(made.ptx, "sm_89")
    used = found.kernels[made.name]
    assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == (0, 0, 0)
    loop = main_loop(functions(disassemble(found.cubin))[made.name])
    assert loop is not None
    rows, cells = schedule.block_m // schedule.warps_m // 16, schedule.block_m * schedule.block_n
    cells, counts = cells // (4 * schedule.threads), loop.counts
    assert (loop.tensor, counts["QMMA"]) == (4 * cells, 4 * cells)
    assert (counts["FFMA"], counts["FMUL"]) == (4 * cells, 2 * rows)
    order = [each.opcode for each in loop.instructions if each.opcode in ("QMMA", "FFMA")]
    behind = order[order.index("FFMA"):].count("QMMA")
    if rows > 1: assert behind >= cells // 2


@pytest.mark.parametrize("name", ["eight warps", "16 rows", "swapped"])
def test_no_bank_conflicts(name: str):
    """But in the store; so they do not become more with the groups."""
    found = []
    for groups in (6, 10):
        spec = scaled(128, 128, 128 * groups, BF16)
        held = given(spec)
        _, report = launched(TABLE.build(spec, SCHEDULES[name], ADA), spec, held, "sm_89", check=False)
        found.append(sum(report.stats.bank_conflicts.values()))
    assert found[0] == found[1]



@pytest.mark.parametrize("sms", [58, 128, 142])
@pytest.mark.parametrize(("m", "n", "k"), [(512, 2048, 4096), (512, 1024, 14336), (256, 1024, 14336),
                                           (128, 1024, 14336), (128, 2048, 4096), (16, 4096, 4096)])
def test_what_is_chosen_is_built(m: int, n: int, k: int, sms: int):
    """Rings may take all of shared memory, of which splits take some, too."""
    gpu, spec = GPU("sm_89", sms), scaled(m, n, k)
    schedule = TABLE.choose(spec, gpu)
    assert isinstance(schedule, ScaledMma)
    TABLE.build(spec, schedule, gpu)
