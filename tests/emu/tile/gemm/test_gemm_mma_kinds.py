"""The mma.sync template's other dtypes, weights of several parts, split sums and orders of tiles."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gemm_case import arguments, launched, near, operand, product, reference, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.tile import tile_scheduler as walk
from tinygrad_nv.tile.expression import Load, Sum, relu, silu
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Mma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F16, BF16, F32 = dtypes.float16, dtypes.bfloat16, dtypes.float32
S8, U8, E4M3, E5M2 = dtypes.int8, dtypes.uint8, dtypes.fp8e4m3, dtypes.fp8e5m2
MAJORS = ["KK", "KM", "MK", "MM"]
PAIRS = [(F32, F32), (S8, S8), (U8, U8), (S8, U8), (U8, S8), (E4M3, E4M3), (E5M2, E5M2), (E4M3, E5M2)]


def schedule_for(dtype: DType, k_bytes: int = 64) -> GemmSchedule:
    """64 × 64 by four warps, three stages."""
    return Mma().block(64, 64).k(k_bytes // dtype.itemsize).warps(2, 2).stages(3)


def arch_for(dtype: DType) -> str: return "sm_89" if dtype in (E4M3, E5M2) else "sm_80"


def mixed(m: int, n: int, k: int, pair: tuple[DType, DType], majors: str = "KK", gap: int = 0) -> GemmSpec:
    """A product of two dtypes into float32, or int32."""
    spec = product(m, n, k, pair[0], dtypes.int32 if pair[0] in (S8, U8) else F32, majors, gap)
    return replace(spec, b=replace(spec.b, dtype=pair[1]))


def exactly(spec: GemmSpec, schedule: GemmSchedule, arch: str = "sm_80", seed: int = 0) -> None:
    """Asserts that integer operands come out exactly."""
    given = arguments(spec, seed)
    got = run(TABLE.build(spec, schedule, GPU(arch)), spec, given, arch, seed)
    assert torch.equal(got, reference(spec, given))


# **** dtypes ****

@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize("pair", PAIRS)
def test_every_dtype_in_every_major(pair: tuple[DType, DType], majors: str):
    """Five tiles along K and a part of one, rows of odd numbers of bytes too."""
    for m, n, k, gap in ((64, 64, 320, 0), (70, 41, 331, 3), (48, 80, 336, 16)):
        exactly(mixed(m, n, k * 2 // pair[0].itemsize, pair, majors, gap), schedule_for(pair[0]),
                arch_for(pair[0]))


EXTENT = st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 128, 130]))
BLOCK, WARPS = st.sampled_from([32, 64, 128]), st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)])
SCHEDULES = st.builds(lambda m, n, k, warps, depth:
                      Mma().block(m, n).k(k).warps(*warps).stages(depth),
                      BLOCK, BLOCK, st.sampled_from([8, 16, 32, 64, 128]), WARPS, st.integers(2, 4))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(PAIRS), EXTENT, EXTENT, st.one_of(EXTENT, st.integers(150, 330)),
       st.sampled_from(MAJORS), st.sampled_from([0, 0, 1, 2, 4, 8, 16]), SCHEDULES, st.integers(0, 3))
def test_integers_come_out_exactly(pair: tuple[DType, DType], m: int, n: int, k: int, majors: str, gap: int,
                                   schedule: Mma, seed: int):
    spec, arch = mixed(m, n, k, pair, majors, gap), arch_for(pair[0])
    legal = not TABLE.problems(spec, schedule, GPU(arch))
    exactly(spec, schedule if legal else schedule_for(pair[0]), arch, seed)


def test_hopper_multiplies_8_bit_floats():
    exactly(mixed(64, 64, 320, (E4M3, E5M2)), schedule_for(E4M3), "sm_90a")


def test_bytes_use_all_of_their_range():
    spec = mixed(64, 64, 320, (U8, S8), "KM")
    given = arguments(spec, most=127)
    assert given["a"].max() > 120
    assert given["b"].min() < -120
    kernel = TABLE.build(spec, schedule_for(U8), GPU("sm_80"))
    assert torch.equal(run(kernel, spec, given), reference(spec, given))


@pytest.mark.parametrize("pair", [(E4M3, E4M3), (E5M2, E4M3)])
def test_random_8_bit_floats_are_as_near_as_their_tensor_cores_sum(pair: tuple[DType, DType]):
    """sm_89 cuts each instruction's terms 13 bits below the largest: two such units for each of 17 steps.
    sm_90 converts them to float16, whose sums are those of float32."""
    spec = mixed(70, 90, 520, pair)
    given = arguments(spec, integers=False)
    exact = reference(spec, given)
    got = run(TABLE.build(spec, schedule_for(E4M3), GPU("sm_89")), spec, given, "sm_89")
    assert (got - exact).abs().max() <= 17 * 2 * 2**-13 * exact.abs().max()
    near(spec, given, run(TABLE.build(spec, schedule_for(E4M3), GPU("sm_90a")), spec, given, "sm_90a"))


@pytest.mark.parametrize("majors", MAJORS)
def test_float32_operands_are_rounded_to_nearest_tf32(majors: str):
    """The answer for operands rounded to 10 bits of mantissa beforehand, halves away from zero."""
    spec = product(70, 90, 200, F32, F32, majors)
    given = arguments(spec, integers=False)
    got = run(TABLE.build(spec, schedule_for(F32), GPU("sm_80")), spec, given)
    for name in "ab":
        bits = given[name].view(torch.int32)
        given[name] = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    near(spec, given, got)


# **** several parts of one weight ****

def gate(m: int, n: int, k: int, parts: int = 2, major: str = "K", dtype: DType = BF16, **more) -> GemmSpec:
    """silu(x · gateᵀ) (x · upᵀ) of one weight [2n, k], or its transpose; sums of all parts for others."""
    spec = product(m, n, k, dtype, dtype, "KK")
    weight = operand(dtype, parts * n, k, "K" if major == "K" else "MN")
    ends = (silu(Sum()) * Sum(part=1)).cast(dtype)
    if parts != 2:
        ends = Sum()
        for part in range(1, parts): ends = ends - Sum(part=part) * float(part)
        ends = ends.cast(dtype)
    return replace(spec, b=weight, parts=parts, part=n * weight.mn, epilogue=ends, **more)


@pytest.mark.parametrize("major", ["K", "MN"])
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 192), (50, 41, 200), (130, 72, 100)])
def test_parts_meet_in_the_epilogue(m: int, n: int, k: int, major: str):
    """silu has no exact values: two roundings of bfloat16 apart at most."""
    spec = gate(m, n, k, major=major)
    given = arguments(spec, integers=False)
    kernel = TABLE.build(spec, Mma().block(64, 64).warps(2, 2), GPU("sm_80"))
    near(spec, given, run(kernel, spec, given), extra=1)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_each_part_has_its_own_sum(parts: int):
    spec = gate(70, 40, 160, parts, dtype=F16)
    spec = replace(spec, out=replace(spec.out, dtype=F32), epilogue=Sum(part=parts - 1) - Sum() * 2.0)
    exactly(spec, Mma().block(32, 32 * parts).warps(2, 2))
    exactly(spec, Mma().block(32, 16 * parts).warps(2, 1))


@pytest.mark.parametrize("between", [1, 2, 8])
def test_parts_that_are_aligned_as_the_first_is_not(between: int):
    """64 columns of each part in rows of 256, the second part's 64 and some columns after the first's."""
    spec = gate(64, 64, 96, dtype=F16)
    weight = replace(operand(F16, 256, 96, "MN"), offset=8)
    spec = replace(spec, b=weight, part=64 + between, out=replace(spec.out, dtype=F32),
                   epilogue=Sum() - Sum(part=1) * 2.0)
    exactly(spec, Mma().block(64, 128).warps(2, 2))


def test_parts_of_bytes_in_splits():
    ends = (Sum(dtypes.int32) - Sum(dtypes.int32, part=1)).cast(dtypes.int32)
    spec = replace(product(40, 24, 512, S8), b=operand(S8, 48, 512), parts=2, part=24 * 512, epilogue=ends)
    exactly(spec, Mma().block(32, 64).k(64).warps(2, 2).split(3))


# **** splits ****

@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("k", "splits"), [(64 * 8, 2), (500, 3), (7 * 32, 7), (97, 4), (33, 2)])
def test_splits_of_the_sum_meet(k: int, splits: int, seed: int):
    spec = product(70, 50, k, BF16, batch=(2,), out=F32, epilogue=relu(Sum() + Load(0, F32, 0, 1, (0,))))
    exactly(spec, Mma().block(64, 32).k(32).warps(2, 1).stages(2).split(splits), seed=seed)


def test_splits_give_the_same_bits_in_any_order_of_ctas():
    spec = product(64, 64, 600, F16, F32)
    given = arguments(spec, integers=False)
    made = TABLE.build(spec, schedule_for(F16).split(5), GPU("sm_80"))
    first, *others = (run(made, spec, given, seed=seed) for seed in range(4))
    assert all(torch.equal(first, other) for other in others)
    near(spec, given, first)


def test_splits_with_rows_known_at_launch():
    spec = product(150, 40, 160, BF16, F32, symbolic=True)
    given = arguments(spec)
    made = TABLE.build(spec, schedule_for(BF16).split(2), GPU("sm_80"))
    for rows in (1, 64, 130):
        assert torch.equal(run(made, spec, given, m=rows), reference(spec, given)[:rows])


# **** orders ****

@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize(("m", "n"), [(160, 96), (96, 160), (128, 64), (20, 100), (100, 20)])
def test_every_tile_is_made_once_in_any_order(m: int, n: int, group: int):
    schedule = Mma().block(32, 32).k(16).warps(1, 1).stages(2).grouped(group)
    exactly(product(m, n, 32, F16, F32), schedule)


def test_groups_of_rows_known_at_launch():
    spec = product(320, 96, 32, F16, F32, symbolic=True)
    given = arguments(spec)
    made = TABLE.build(spec, Mma().block(32, 32).warps(2, 2).grouped(3), GPU("sm_80"))
    for rows in (33, 200, 320):
        assert torch.equal(run(made, spec, given, m=rows), reference(spec, given)[:rows])


@pytest.mark.parametrize("matrices", [4, 5, 7, 12])
def test_more_matrices_than_a_grid_is_high(matrices: int, monkeypatch: pytest.MonkeyPatch):
    """With a limit of 4 in place of 32768: three layers of three for seven, two CTAs of which leave."""
    monkeypatch.setattr(walk, "MOST_GRID_Y", 4)
    spec, schedule = product(20, 20, 40, F16, F32, batch=(matrices,)), Mma().block(32, 32).warps(1, 1)
    assert TABLE.build(spec, schedule, GPU("sm_80")).grid[1] <= 4
    exactly(spec, schedule)


def test_swapped_products():
    exactly(product(20, 200, 96, F16, F32, "KM"), schedule_for(F16).swapped())


# **** what is refused, what it costs ****

@pytest.mark.parametrize(("spec", "arch", "words"), [
    (mixed(64, 64, 64, (E4M3, E4M3)), "sm_80", "begins with sm_89, this is sm_80"),
    (replace(product(64, 64, 64, F32), tf32=False), "sm_80", "without tf32"),
    (gate(64, 64, 64, 3), "sm_80", "block_n=128 is not a multiple of 2 warps × 3 parts × 16 = 96"),
])
def test_products_without_an_instruction_are_refused(spec: GemmSpec, arch: str, words: str):
    with pytest.raises(ScheduleError) as error: TABLE.build(spec, Mma(), GPU(arch))
    assert words in str(error.value)


@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize("pair", [(F32, F32), (S8, S8), (E4M3, E4M3)])
def test_large_tiles_neither_spill_nor_meet_bank_conflicts(pair: tuple[DType, DType], majors: str):
    spec, arch = mixed(128, 128, 512, pair, majors), arch_for(pair[0])
    made = TABLE.build(spec, Mma().k(64 // pair[0].itemsize), GPU(arch))
    resources = assemble(made.ptx, arch).kernels[made.name]
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)
    _, report = launched(made, spec, arguments(spec), arch)
    assert report.findings == []
    assert report.stats.bank_conflicts == {}
    assert report.stats.tensor_flops == spec.flops
