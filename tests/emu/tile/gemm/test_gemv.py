"""Products with few rows on the emulator: what each path of a kernel does. test_gemv_generated.py has the
extents, majors, dtypes, batches and schedules."""
from __future__ import annotations

import pytest
import torch
from gemm_case import arguments, near, operand, product, reference, result, run
from gemv_case import ARCHES, DTYPES, GEMV, best, check, exact, scheduled
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.expression import Constant, Load, Position, Sum
from tinygrad_nv.tile.gemm.gemv.plan import GemvPlan
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("splits", [1, 3, 8, 11])
@pytest.mark.parametrize(("m", "majors"), [(1, "KK"), (1, "KM"), (5, "KK"), (9, "KM")])
def test_long_sums(arch: str, splits: int, m: int, majors: str):
    """Seven iterations a warp, and something left, in any number of splits."""
    step = GemvPlan.of(product(m, 40, 2048, majors=majors), GEMV).step
    spec = product(m, 40, 15 * step + 24, majors=majors, out=dtypes.float32)
    check(spec, scheduled(spec, 1, 1, 2, splits), arch, seed=splits % 4)


@pytest.mark.parametrize("splits", [4, 12])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_splits_give_the_same_bits_in_any_order(splits: int, arch: str):
    spec = product(3, 33, 1000, out=dtypes.float32)
    given_ = arguments(spec, integers=False)
    made = TABLE.build(spec, scheduled(spec, 1, 1, 2, splits), GPU(arch))
    assert (made.cluster[1] > 1) == (arch == "sm_90a" and splits <= 8)
    got = [run(made, spec, given_, arch, seed) for seed in range(4)]
    assert all(torch.equal(got[0], other) for other in got[1:])


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("majors", ["KK", "KM"])
@pytest.mark.parametrize("m", [1, 4, 16])
def test_random_values_are_as_near_as_a_float32_sum(dtype: DType, majors: str, m: int):
    for out in (dtype, dtypes.float32):
        spec = product(m, 72, 1032, dtype, out, majors)
        given_ = arguments(spec, integers=False)
        near(spec, given_, run(TABLE.build(spec, best(spec, "sm_80"), GPU("sm_80")), spec, given_))


def test_float32_is_multiplied_in_float32():
    """Not in tf32, which has 10 bits: 1 + 2^-20 keeps its last one."""
    spec = product(2, 32, 128, dtypes.float32)
    given_ = arguments(spec)
    given_["a"].fill_(1 + 2**-20)
    given_["b"].fill_(0)
    given_["b"][::128] = 1
    assert (run(TABLE.build(spec, best(spec, "sm_80"), GPU("sm_80")), spec, given_) == 1 + 2**-20).all()


@pytest.mark.parametrize("dtype", DTYPES[3:5])
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("majors", ["KK", "KM"])
def test_every_fp8_number_is_read_as_it_is(dtype: DType, arch: str, majors: str):
    """Row n of the weights has number n at K = 0, and 0 after it: the result is the number, or NaN."""
    spec = product(1, 256, 32, dtype, dtypes.float32, majors)
    given_ = arguments(spec)
    given_["a"].fill_(0)
    given_["a"][0] = 1.0
    given_["b"].fill_(0)
    every = torch.arange(256, dtype=torch.uint8)
    given_["b"].view(torch.uint8)[slice(0, None, 32) if majors == "KK" else slice(256)] = every
    got = run(TABLE.build(spec, scheduled(spec, 1, 1, 2, 1), GPU(arch)), spec, given_, arch)
    want = every.view(given_["b"].dtype).double()
    assert torch.equal(got[0].nan_to_num(1e9, 2e9, -2e9), want.nan_to_num(1e9, 2e9, -2e9))


def gate(gate_sum: Sum, up_sum: Sum, out: DType):
    """relu(gate) × up, which integers hold."""
    return (gate_sum.maximum(0.0) * up_sum).cast(out)


@pytest.mark.parametrize(("m", "majors", "dtype"), [
    (1, "KK", dtypes.bfloat16), (6, "KK", dtypes.bfloat16), (1, "KM", dtypes.float16),
    (16, "KM", dtypes.bfloat16), (7, "KK", dtypes.float32), (3, "KM", dtypes.float32),
    (2, "KK", dtypes.fp8e4m3)])
@pytest.mark.parametrize("splits", [1, 2])
def test_two_parts_meet_in_the_epilogue(m: int, majors: str, dtype: DType, splits: int):
    n, k = 40, 264
    both = operand(dtype, 2 * n, k, "K" if majors[1] == "K" else "MN")
    part = n * both.mn
    spec = GemmSpec(m, n, k, operand(dtype, m, k), both, result(dtypes.float32, m, n), parts=2, part=part,
                    epilogue=gate(Sum(), Sum(part=1), dtypes.float32), tf32=dtype == dtypes.float32)
    check(spec, scheduled(spec, 1, 1, 4, splits), "sm_90a")


@pytest.mark.parametrize("m", [1, 5])
def test_epilogues_read_rows_columns_and_matrices(m: int):
    n, k = 30, 296
    bias, residual = Load(0, dtypes.float32, 0, 1), Load(1, dtypes.float32, n, 1, (m * n,))
    ends = ((Sum() + bias).maximum(Constant(0.0)) + residual + Position("m").cast(dtypes.float32)
            + Position(0).cast(dtypes.float32))
    spec = product(m, n, k, out=dtypes.float32, batch=(3,), epilogue=ends)
    for splits in (1, 2): check(spec, scheduled(spec, 1, 1, 4, splits), "sm_90a")


@pytest.mark.parametrize("out_major", ["N", "M"])
@pytest.mark.parametrize("majors", ["KK", "MK", "KM"])
@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.int8])
def test_few_columns_are_the_transposed_product(out_major: str, majors: str, dtype: DType):
    spec = product(50, 5, 200, dtype, exact(dtype), majors, out_major=out_major, batch=(2,))
    schedule = best(spec, "sm_80")
    assert schedule.swap
    check(spec, schedule, "sm_80")


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize(("mn", "k"), [(1500, 3), (3, 150), (0, 1), (2, 0)])
def test_strides_of_any_kind(m: int, mn: int, k: int):
    """Weights with gaps in both dimensions, and weights that are the same for all columns or all of K."""
    n, depth = 45, 400
    spec = GemmSpec(m, n, depth, Operand(dtypes.float16, 1, m + 2), Operand(dtypes.float16, mn, k, offset=5),
                    result(dtypes.float32, m, n))
    check(spec, scheduled(spec, 1, 1, 4, 1), "sm_80")


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("majors", ["KK", "KM"])
def test_infinity_stays_infinity(m: int, majors: str):
    """What is left of K meets registers that had weights before: infinity times nothing would be NaN."""
    n, step = 40, GemvPlan.of(product(m, 40, 2048, majors=majors), GEMV).step
    spec = product(m, n, 3 * step + 8, majors=majors, out=dtypes.float32)
    given_ = arguments(spec)
    given_["a"].fill_(1)
    weights = given_["b"].view(n, spec.k).T if majors == "KK" else given_["b"].view(spec.k, n)
    weights[2 * step:3 * step, 3] = torch.inf
    got = run(TABLE.build(spec, scheduled(spec, 1, 1, 1, 1), GPU("sm_80")), spec, given_)
    assert torch.equal(got, reference(spec, given_))


def test_weights_that_matrices_share():
    for strides in ((0,), (0, 600)):
        batch = (3,) if len(strides) == 1 else (3, 2)
        a = operand(dtypes.bfloat16, 2, 60, batch=batch)
        b = Operand(dtypes.bfloat16, 60, 1, strides)
        spec = GemmSpec(2, 10, 60, a, b, result(dtypes.float32, 2, 10, batch=batch), batch)
        check(spec, scheduled(spec, 1, 1, 4, 1), "sm_80")


@pytest.mark.parametrize("m", [1, 2, 8, 16])
@pytest.mark.parametrize(("n", "k"), [(96, 128), (32, 128), (224, 64), (64, 448), (501, 64)])
def test_shapes_of_llama_8b_by_64(m: int, n: int, k: int):
    """Query and output, key and value, gate or up, down, and the vocabulary."""
    for arch in ARCHES:
        spec = product(m, n, k, out=dtypes.float32)
        given_ = arguments(spec)
        got = run(TABLE.build(spec, best(spec, arch), GPU(arch)), spec, given_, arch)
        assert torch.equal(got, reference(spec, given_))
