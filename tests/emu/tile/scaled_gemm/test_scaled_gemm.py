"""FP8 matmuls with scales of groups by wgmma on the emulator: exact for integers and powers of two, near for
others, in every schedule; and what ptxas makes of the loop."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tests.support.tile.gemm_case import arguments, product, reference, run
from tests.support.tile.scaled_gemm_case import E4M3, F32, given, near, scaled, wide
from tinygrad_nv.errors import SpecError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.sass import disassemble, functions, main_loop
from tinygrad_nv.tile.expression import Apply, Constant, Load, Sum
from tinygrad_nv.tile.gemm.schedules import Wgmma
from tinygrad_nv.tile.scaled_gemm.schedules import ScaledWgmma
from tinygrad_nv.tile.scaled_gemm.spec import BlockScales, ScaledGemmSpec
from tinygrad_nv.tile.spec_json import spec_from_json, spec_to_json
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BF16, S = dtypes.bfloat16, ScaledWgmma()
HOPPER = GPU("sm_90a", 4)
ONE = S.block(64, 64).warps(8).stages(3)
SCHEDULES = {
    "two consumers": S.block(128, 128).stages(3), "three consumers": S.block(192, 64).warps(16).stages(3),
    "one consumer": ONE, "64 rows twice": S.block(256, 128).stages(2),
    "ping-pong": S.block(64, 128).pingpong().stages(4), "cluster": S.block(128, 64).stages(3).cluster(2),
    "splits": ONE.stages(2).split(2), "stream-K": ONE.stream_k(),
    "swapped": S.block(64, 32).warps(8).stages(3).swap_operands(),
    "swapped, two consumers": S.block(128, 16).stages(4).swap_operands()}


def check(spec: ScaledGemmSpec, schedule: ScaledWgmma, m: int | None = None) -> None:
    """Integers and powers of two come out exactly."""
    held = given(spec)
    got = run(TABLE.build(spec, schedule, HOPPER), spec, held, "sm_90a", m=m)
    left, right = wide(spec, held)
    assert torch.equal(got, (left @ right.T)[:m])


@pytest.mark.parametrize("name", SCHEDULES)
def test_integers_are_exact(name: str):
    """Odd rows and columns, K that ends within a group, as many groups as stages and two more at least."""
    spec, schedule = scaled(141, 203, 128 * 6 - 48), SCHEDULES[name]
    assert spec.groups >= schedule.depth + 2
    check(spec, schedule)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 128), (3, 130, 16), (65, 257, 144), (70, 40, 1280)])
def test_extents(m: int, n: int, k: int):
    for name in ("two consumers", "swapped"): check(scaled(m, n, k), SCHEDULES[name])


@pytest.mark.parametrize("m", [1, 70, 140])
def test_symbolic_rows(m: int):
    check(scaled(140, 136, 512, symbolic=True), SCHEDULES["two consumers"], m)


@pytest.mark.parametrize("name", ["one consumer", "swapped"])
def test_scales_of_other_strides(name: str):
    check(scaled(70, 130, 400, along_m=True), SCHEDULES[name])


def test_blocks_of_rows_smaller_and_larger_than_a_tile():
    for rows in (32, 256): check(scaled(70, 300, 400, rows=rows), SCHEDULES["two consumers"])


@pytest.mark.parametrize("name", ["two consumers", "swapped", "splits"])
def test_others_are_as_near_as_sums_of_128(name: str): near(scaled(70, 130, 1100), SCHEDULES[name], HOPPER)


def test_an_epilogue():
    spec = scaled(70, 136, 640, BF16)
    spec = replace(spec, epilogue=(Sum() + Load(0, F32, 0, 1)).cast(BF16))
    held = given(spec)
    held["x0"] = torch.arange(136.0)
    left, right = wide(spec, held)
    got = run(TABLE.build(spec, SCHEDULES["two consumers"], HOPPER), spec, held, "sm_90a")
    assert torch.equal(got, (left @ right.T + held["x0"].double()).to(torch.bfloat16).double())


def test_a_static_scale_makes_codes_in_the_epilogue():
    """Of 8 bits, by an exact quotient, of scaled sums and of plain ones."""
    spec = scaled(70, 144, 640, E4M3)
    spec = replace(spec, epilogue=Apply("div", (Sum(), Constant(48.0)), F32).cast(E4M3))
    plain = product(70, 144, 640, E4M3, epilogue=spec.epilogue)
    wgmma = Wgmma().block(128, 128).k(128).stages(3)
    for one, schedule in ((spec, SCHEDULES["two consumers"]), (plain, wgmma)):
        held = given(spec) if one is spec else arguments(one)
        got = run(TABLE.build(one, schedule, HOPPER), one, held, "sm_90a")
        exact = (reference(replace(one, out=replace(one.out, dtype=F32), epilogue=Sum()), held).float() / 48)
        assert torch.equal(got, exact.clamp(-448, 448).to(torch.float8_e4m3fn).double())


def test_the_reference_is_the_same_function():
    spec = scaled(20, 140, 300)
    held = given(spec)
    storages = {name: Tensor((each.view(torch.uint8) if each.dtype == torch.float8_e4m3fn else each).numpy())
                for name, each in held.items()}
    storages |= {name: storages[name].bitcast(dtypes.fp8e4m3) for name in "ab"}
    left, right = wide(spec, held)
    for exact in (False, True):
        (made,) = TABLE.reference(spec, storages, exact)
        assert torch.equal(torch.from_numpy(made.numpy()).double(), left @ right.T)


def test_a_schedule_is_chosen_for_many_rows_and_for_few():
    for m, n, k in ((4096, 4096, 4096), (1, 4096, 4096), (24, 7168, 2048), (300, 576, 7168)):
        spec = scaled(m, n, k, BF16)
        found = TABLE.choose(spec, GPU("sm_90a", 132))
        assert isinstance(found, ScaledWgmma)
        assert spec_from_json(spec_to_json(spec)) == spec
        assert TABLE.read("gpu", found.to_json()) == found
    assert "wgmma needs sm_90a" in TABLE.why_not(spec, GPU("sm_80"))


REFUSED = {"a stage is a group of 128": S.k(256).stages(2),
           "128 columns with a scale each": S.block(64, 128).warps(8).swap_operands(),
           "neither divides the other": S.block(128, 96)}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_schedules(words: str):
    schedule = REFUSED[words]
    if schedule.depth > 2: schedule = schedule.stages(3)
    assert words in "; ".join(TABLE.problems(scaled(256, 256, 1024), schedule, GPU("sm_90a")))


def test_refused_specs():
    spec = scaled(64, 64, 256)
    with pytest.raises(SpecError, match="8-bit floats"):
        replace(spec, a=replace(spec.a, dtype=BF16), b=replace(spec.b, dtype=BF16))
    with pytest.raises(SpecError, match="of 2 parts"): replace(spec, parts=2, part=64 * 256)
    with pytest.raises(SpecError, match="scales 0x128"): replace(spec, a_scale=BlockScales(0, 2))


# **** what ptxas makes of it ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", TABLE.find_template("gpu", "scaled_wgmma").candidates(
    scaled(4096, 4096, 4096), GPU("sm_90a")), ids=str)
def test_the_loop_neither_spills_nor_serialises(schedule: ScaledWgmma):
    """`assemble` raises where ptxas says that it serialised wgmmas. Scales are multiplied behind a group's
    first wgmma: nothing that waits for them stands before it."""
    spec = scaled(4096, 4096, 4096, BF16)
    while TABLE.problems(spec, schedule, GPU("sm_90a")): schedule = schedule.stages(schedule.depth - 1)
    made = TABLE.build(spec, schedule, GPU("sm_90a", 132))
    found = assemble(made.ptx, "sm_90a")
    used = found.kernels[made.name]
    assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == (0, 0, 0)
    loop = main_loop(functions(disassemble(found.cubin))[made.name])
    assert loop is not None
    subtiles = schedule.block_m // 64 // (1 if schedule.mode == "pingpong" else schedule.consumers)
    counts = loop.counts
    assert loop.tensor == 4 * subtiles
    assert counts["FFMA"] == schedule.block_n // 2 * subtiles   # of each sum
    first = {name: min(each.address for each in loop.instructions if each.opcode == name)
             for name in ("FMUL", "QGMMA")}
    assert first["QGMMA"] < first["FMUL"]
    assert "LDG" not in counts
