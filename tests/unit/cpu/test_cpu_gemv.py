"""GEMV on the CPU: every level, dtype and way that operands can lie, epilogues, parts, symbolic rows."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given as forall
from hypothesis import settings
from hypothesis import strategies as st
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tests.support.cpu.cpu_gemv_case import BEST, LEVELS, exact, loaded, run, scheduled
from tests.support.tile.gemm_case import arguments, product, reference
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.gemm.gemv import kernel as gemv
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.explain import explain
from tinygrad_nv.tile.expression import Apply, Expression, Load, Position, Sum, relu, silu
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16
DTYPES = [F32, BF16, F16, dtypes.fp8e4m3, dtypes.fp8e5m2, dtypes.int8, dtypes.uint8]


def wrong(spec: GemmSpec) -> list[str]:
    """Why gemv does not take a product."""
    return gemv.problems(spec, gemv.default(spec, CPU(BEST, 2)))


def whole(dtype: DType) -> DType:
    """A result that holds sums of integers."""
    return dtypes.int32 if dtypes.is_int(dtype) else F32


@pytest.mark.sampled(1)
@pytest.mark.parametrize("majors", ["KK", "KM", "MK"])
@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_levels(level: isa.ISA, majors: str):
    """Tails of k, of columns and of streams; rows of one tile and of two; one row by itself."""
    for m, dtype in ((1, BF16), (2, F32), (9, BF16)):
        spec = product(m, 75, 149, dtype, F32, majors, gap=3, offset=5)
        exact(spec, scheduled(spec, level, parts=3, block_n=40))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: DType):
    for level, majors in ((LEVELS[0], "KK"), (BEST, "KK"), (BEST, "KM")):
        spec = product(3, 37, 70, dtype, whole(dtype), majors)
        exact(spec, scheduled(spec, level))


def test_blocks_of_k():
    """More of a than the first cache holds: sums wait in memory between blocks of k."""
    for level in (LEVELS[0], BEST):
        for m, dtype in ((3, F32), (16, BF16)):
            spec = product(m, 43, 330, dtype, F32)
            exact(spec, scheduled(spec, level, block_k=64))
            exact(spec, scheduled(spec, level, block_k=128, rows=2))
    big = product(16, 20, 2100, F32)
    assert scheduled(big).block_k > 0
    exact(big)


@pytest.mark.skipif(not BEST.bf16, reason="no dot products of bfloat16")
def test_many_rows_of_pairs():
    """Tails of rows, of columns and of k; columns that the next block of k, or nothing, follows; rows that
    are copied, as they lie at multiples of a cache's sets, or are no neighbours along k."""
    for m, n, k, changes in ((9, 75, 149, {}), (19, 43, 330, {"block_k": 64, "parts": 3}), (64, 130, 768, {}),
                             (30, 6, 40, {"block_n": 6}), (16, 21, 1024, {})):
        spec = product(m, n, k, BF16, F32, gap=0 if k == 1024 else 3, offset=5)
        exact(spec, scheduled(spec, **changes))
    exact(product(11, 40, 70, BF16, F32, "MK", batch=(2,)))
    exact(replace(product(12, 40, 70, BF16, F32), symbolic=True), m=10)
    close(gate(50, 200, 22, BF16, "K"), roundings=6)


@pytest.mark.skipif(not BEST.bf16, reason="no dot products of bfloat16")
def test_how_many_rows_are_pairs():
    """Columns whose places in a cache are the same are packed from 17 rows on; tiles of AMX take as many."""
    assert wrong(product(65, 96, 96, BF16)) == ["65 rows, at most 64"]
    assert wrong(product(17, 96, 1024, BF16)) == ["17 rows, at most 16"]
    spec = product(32, 96, 96, BF16)
    assert gemv.problems(spec, gemv.default(spec, CPU(isa.AMX, 2))) == ["32 rows, at most 16"]
    assert gemv.problems(spec, scheduled(spec, rows=2, block_k=48)) == [
        "rows 2, 4 are needed", "block_k 48, a multiple of 32 is needed"]


def test_rows_of_float32_are_tiles_of_as_many_sums_as_registers_hold():
    """Lanes of four columns are added at once: 16 rows by 8 x 2 took 1.2 to 1.4 times as long as by 6 x 4."""
    def tile(m: int, level: isa.ISA) -> tuple[int, int]:
        made = gemv.default(product(m, 2048, 512, dtypes.float32), CPU(level, 2))
        return made.block_m, made.rows
    assert [tile(m, isa.AVX512) for m in (1, 4, 6, 8, 16)] == [(1, 4), (4, 4), (6, 4), (4, 4), (6, 4)]
    assert [tile(m, isa.AVX2) for m in (1, 3, 8, 16)] == [(1, 4), (3, 4), (3, 4), (3, 4)]


@pytest.mark.parametrize(("m", "times"), [(4, 0), (5, 4), (16, 4)])
def test_what_is_read_next_is_fetched_once(m: int, times: int):
    """By the first tile of rows alone; of few rows a processor keeps up by itself."""
    text = gemv.build(spec := product(m, 64, 512, dtypes.float32), scheduled(spec)).source
    assert text.count("k + ahead, 0, 2)") == times


def test_a_that_no_stack_holds_is_read_as_it_lies():
    spec = product(16, 5, 13008, F16, F32)
    assert wrong(replace(spec, symbolic=True)) == [
        "16 rows of 13008, symbolic, have 834560 bytes in float32, at most 786432 on a stack"]
    exact(spec)
    exact(replace(spec, b=replace(spec.b, mn=1, k=7)))


def test_many_rows_of_few_columns_are_the_product_transposed():
    for majors in ("KK", "KM"):
        spec = product(150, 3, 70, F32, F32, majors,
                       epilogue=Sum() + Load(0, F32, 1, 0) + Load(1, F32, 0, 1) + Position("m").cast(F32))
        exact(spec)


def test_strides_of_everything():
    """b in no order at all, a's rows scattered, a result of columns, three dimensions of batch."""
    spec = GemmSpec(3, 21, 18, Operand(F32, 5, 17, (400, 0, 1600)), Operand(F32, 40, 2, (0, 900, 2700)),
                    Result(F32, 1, 3, (63, 126, 252)), (2, 2, 3), Sum() + Load(0, F32, 2, 3, (0, 100, 7)))
    for level in LEVELS: exact(spec, scheduled(spec, level, parts=5, block_n=16))
    exact(replace(spec, b=replace(spec.b, mn=1, k=40)))


def gate(n: int, k: int, m: int, dtype: DType, major: str) -> GemmSpec:
    """silu(gate) up of one weight."""
    b = Operand(dtype, k, 1) if major == "K" else Operand(dtype, 1, 2 * n)
    kind = dtype if dtype != F32 else F32
    epilogue = silu(Sum().cast(kind)) * Sum(F32, 1).cast(kind)
    return GemmSpec(m, n, k, Operand(dtype, k, 1), b, Result(dtype, n, 1), (), epilogue, 2,
                    n * k if major == "K" else n)


def close(spec: GemmSpec, level: isa.ISA = BEST, roundings: int = 2) -> None:
    """Within twice the error of float32 sums, and `roundings` of the result."""
    given = arguments(spec, 1, integers=False)
    got = run(loaded(spec, scheduled(spec, level)), spec, given)
    answer, plain = reference(spec, given), reference(spec, given, float32=True, in_turn=True)
    unit = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}[spec.out.dtype]
    bound = 2 * (plain - answer).abs().max() + roundings * unit * answer.abs().clamp(min=0.1)
    assert ((got - answer).abs() <= bound).all(), float(((got - answer).abs() / bound).max())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("major", "KM")
def test_close_to_the_answer(major: str, dtype: DType):
    close(product(2, 90, 600, dtype, majors="K" + major))
    close(gate(50, 200, 2, dtype, major), roundings=6)


def test_epilogues():
    bias, residual = Load(0, BF16, 0, 1), Load(1, BF16, 70, 1, offset=2)
    ends: Expression = relu((Sum() + bias.cast(F32)).cast(BF16)) + residual
    spec = product(2, 70, 33, BF16, epilogue=ends)
    for level in LEVELS: exact(spec, scheduled(spec, level))


@pytest.mark.parametrize("majors", ["KK", "KM"])
def test_symbolic_rows(majors: str):
    spec = replace(product(6, 45, 70, BF16, F32, majors), symbolic=True)
    given, kernel = arguments(spec), loaded(spec)
    for m in (1, 3, 6): assert torch.equal(run(kernel, spec, given, m=m), reference(spec, given)[:m])


def test_what_is_no_number_is_its_rows_alone():
    for majors in ("KK", "KM"):
        spec = product(4, 20, 40, F32, majors=majors)
        given = arguments(spec)
        given["a"][2 * 40 + 39] = torch.nan
        assert run(loaded(spec), spec, given).isnan().any(-1).tolist() == [False, False, True, False]


FORMS = (st.sampled_from(["KK", "KM", "MK", "MM"]), st.sampled_from(DTYPES), st.sampled_from(LEVELS),
         st.sampled_from([(), (3,), (2, 2)]), st.integers(0, 5), st.sampled_from("NM"), st.integers(1, 9))


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@forall(st.integers(1, 16), st.integers(1, 80), st.integers(1, 150), *FORMS)
def test_any_product(m, n, k, majors, dtype, level, batch, gap, out_major, parts):
    spec = product(m, n, k, dtype, whole(dtype), majors, gap, batch, out_major=out_major)
    exact(spec, scheduled(spec, level, parts=parts))


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@forall(st.integers(1, 16), st.integers(1, 600), st.integers(1, 900), *FORMS, st.sampled_from([0, 64, 192]))
def test_any_product_at_length(m, n, k, majors, dtype, level, batch, gap, out_major, parts, block_k):
    spec = product(m, n, k, dtype, whole(dtype), majors, gap, batch, out_major=out_major)
    usual = scheduled(spec, level)
    exact(spec, replace(usual, parts=parts, block_k=block_k if majors[1] == "K" else usual.block_k))


def test_parts_are_worth_waking_threads_for():
    def parts(spec: GemmSpec, threads: int = 4) -> int: return scheduled(spec, threads=threads).parts
    assert parts(product(1, 64, 64, F32)) == 1
    assert parts(product(1, 512, 64, F32)) == 2
    assert parts(product(1, 4096, 4096, F32)) == 4 * gemv.PARTS
    assert parts(product(1, 4096, 4096, F32), threads=1) == 1
    assert parts(product(1, 8, 1 << 20, F32)) == 8
    assert parts(product(2, 64, 64, F32, batch=(64,))) == 16


def test_what_is_refused_is_said():
    assert wrong(product(17, 100, 8, F32)) == ["17 rows, at most 16"]
    assert wrong(product(1, 8, 8, F32, epilogue=Apply("sin", (Sum(),), F32))) == [
        "sin in an epilogue"]
    strided = replace(product(16, 100, 13008, F32), a=Operand(F32, 1, 16))
    assert wrong(strided) == [
        "16 rows of 13008, at strides of 16, have 834560 bytes in float32, at most 786432 on a stack"]


def test_tensors_on_the_cpu():
    random = np.random.default_rng(0)
    x, w, bias = (random.integers(-4, 5, shape).astype(np.float32) for shape in ((2, 48), (48, 48), (48,)))
    for made, answer in ((Tensor(x) @ Tensor(w).T + Tensor(bias), x @ w.T + bias),
                         (Tensor(x) @ Tensor(w), x @ w)):
        assert "gemv" in str(explain(made))
        np.testing.assert_array_equal(made.numpy(), answer)


def test_short_sums_of_few_columns_are_left_to_tinygrad():
    """A million rows by 4 x 4 took five times as long by gemv."""
    def found(m: int, n: int, k: int) -> tuple[str | None, str]:
        a, b = Tensor.empty(m, k, device="CPU"), Tensor.empty(k, n, device="CPU")
        kernel, = explain((a @ b).relu()).kernels
        return kernel.template, kernel.reason
    assert found(1000, 4, 4) == (None, "gemm: K of 4 with 4 rows or columns, at least 9 or 64")
    assert found(4, 1000, 8)[0] == found(100, 17, 2)[0] is None
    assert found(1000, 4, 9)[0] == "gemv"
    assert found(100, 64, 4)[0] == "gemm"
