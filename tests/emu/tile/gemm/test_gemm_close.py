"""Random values come out of every template as near as float32 sums are, or as what tensor cores cut."""
from __future__ import annotations

from dataclasses import replace
from itertools import product as pairs

import pytest
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.tile.gemm_case import arguments, near, operand, product, reference, result, run
from tests.support.tile.gemv_case import best
from tinygrad_nv.tile.expression import Sum, silu
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Mma, Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F16, BF16, F32, E4M3, E5M2 = (dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.fp8e4m3,
                              dtypes.fp8e5m2)
W = Wgmma()
M64, W64 = Mma().block(64, 64).k(32).warps(2, 2).stages(3), W.block(128, 64)
ARCH = {"mma": "sm_80", "wgmma": "sm_90a", "gemv": "sm_80"}


def made(spec: GemmSpec, schedule: GemmSchedule, given: dict[str, torch.Tensor], arch: str = "",
         sm_count: int = 132) -> torch.Tensor:
    """The result."""
    arch = arch or ARCH[schedule.template]
    return run(TABLE.build(spec, schedule, GPU(arch, sm_count)), spec, given, arch)


@pytest.mark.parametrize(("dtype", "out"), list(pairs([F16, BF16], [F16, BF16, F32])))
@pytest.mark.parametrize("schedule", [M64, W64], ids=["mma", "wgmma"])
def test_as_near_as_a_float32_sum(schedule: GemmSchedule, dtype: DType, out: DType):
    spec = product(70, 90, 520, dtype, out)
    given = arguments(spec, integers=False)
    # the exact sum is rounded too: where it lies between two results, both are right
    near(spec, given, made(spec, schedule, given), extra=1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("majors", ["KK", "KM"])
@pytest.mark.parametrize("m", [1, 4, 16])
def test_few_rows_are_as_near_as_a_float32_sum(dtype: DType, majors: str, m: int):
    for out in (dtype, F32):
        spec = product(m, 72, 1032, dtype, out, majors)
        given = arguments(spec, integers=False)
        near(spec, given, made(spec, best(spec, "sm_80"), given))


@pytest.mark.parametrize("pair", [(E4M3, E4M3), (E5M2, E4M3)])
def test_8_bit_floats_are_as_near_as_their_tensor_cores_sum(pair: tuple[DType, DType]):
    """sm_89 cuts each instruction's terms 13 bits below the largest: two such units for each of 17 steps.
    sm_90 converts them to float16, whose sums are those of float32."""
    spec = product(70, 90, 520, pair[0], F32)
    spec = replace(spec, b=replace(spec.b, dtype=pair[1]))
    given = arguments(spec, integers=False)
    exact = reference(spec, given)
    got = made(spec, M64.k(64), given, "sm_89")
    assert (got - exact).abs().max() <= 17 * 2 * 2**-13 * exact.abs().max()
    near(spec, given, made(spec, M64.k(64), given, "sm_90a"))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_fp8_sums_are_promoted(dtype: DType):
    """Sums of 4096 products, all positive, to 4 roundings of the tensor core's 13 bits, each of at most 33
    terms: without promotion every instruction would lose as much of the whole sum."""
    spec = product(70, 40, 4096, dtype, F32)
    given = arguments(spec, integers=False)
    given = {name: storage.float().abs().to(storage.dtype) for name, storage in given.items()}
    exact = reference(spec, given)
    assert ((made(spec, W64.k(128), given) - exact).abs() <= 2.0**-10 * exact).all()


@pytest.mark.parametrize("k", [32, 64, 128, 256])
def test_fp8_sums_of_mma_are_promoted_on_sm_89(k: int):
    """The same: 3 % less without promotion."""
    spec = product(20, 40, 2048, E4M3, F32)
    given = arguments(spec, integers=False)
    given = {name: storage.float().abs().to(storage.dtype) for name, storage in given.items()}
    exact = reference(spec, given)
    assert ((made(spec, M64.block(32, 32).warps(1, 2).k(k).stages(3), given, "sm_89") - exact).abs()
            <= 2.0**-10 * exact).all()


@pytest.mark.parametrize("majors", ["KK", "KM", "MK", "MM"])
def test_mma_rounds_float32_operands_to_the_nearest_tf32(majors: str):
    """The answer for operands rounded to 10 bits of mantissa beforehand, halves away from zero."""
    spec = product(70, 90, 200, F32, F32, majors)
    given = arguments(spec, integers=False)
    got = made(spec, M64.k(16), given)
    for name in "ab":
        bits = given[name].view(torch.int32)
        given[name] = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    near(spec, given, got)


def test_wgmma_cuts_float32_operands_to_ten_bits():
    """Each operand loses less than 2^-10 of itself."""
    spec = product(70, 40, 320, F32)
    given = arguments(spec, integers=False)
    exact = reference(spec, given)
    most = reference(spec, {name: storage.abs() for name, storage in given.items()})
    assert ((made(spec, W64.k(32), given) - exact).abs() <= 2.0**-9 * most).all()


# **** gates ****

def gate(m: int, n: int, k: int, major: str, rounded: bool) -> GemmSpec:
    """silu(x @ g) * (x @ u) of one weight, whose halves are rows (K-major) or columns apart; sums rounded
    before."""
    b = operand(BF16, 2 * n, k, major)
    first, second = (each.cast(BF16) if rounded else each for each in (Sum(), Sum(F32, 1)))
    ends = (silu(first) * second).cast(BF16)
    return GemmSpec(m, n, k, operand(BF16, m, k), b, result(BF16, m, n), (), ends, 2, n * b.mn)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("schedule", "major", "extents"), [
    *[(Mma().block(64, 64).warps(2, 2), major, extents) for major in ("K", "MN")
      for extents in ((64, 64, 192), (50, 41, 200), (130, 72, 100))],
    *[(schedule, major, (200, 96, 64 * 6)) for schedule, major in (
        (W.block(128, 128), "K"), (W.block(128, 128), "MN"), (W.block(128, 96).cluster(2, 2), "K"),
        (W.block(128, 64).pingpong(), "MN"), (W.block(64, 16).warps(8), "K"))]])
def test_gates(schedule: GemmSchedule, major: str, extents: tuple[int, int, int]):
    """silu has no exact values: two roundings of bfloat16 apart at most, more of rounded sums."""
    wgmma = isinstance(schedule, Wgmma)
    spec = gate(*extents, major, wgmma)
    given = arguments(spec, integers=False)
    near(spec, given, made(spec, schedule, given, sm_count=4), extra=12 if wgmma else 1)
