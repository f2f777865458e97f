"""Blocked products on the CPU: every level this machine has, and pairs and quads in plain C."""
from __future__ import annotations

from dataclasses import replace
from itertools import product as pairs

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from tinygrad.device import Device
from tinygrad.dtype import dtypes
from tinygrad.runtime.support.elf import elf_loader
from tinygrad.tensor import Tensor

from tests.support.cpu.cpu_gemv_case import LEVELS, run
from tests.support.tile.gemm_case import GUARD, arguments, near, product, reference
from tinygrad_nv import explain
from tinygrad_nv.cpu.gemm.blocked import kernel as gemm
from tinygrad_nv.cpu.gemm.blocked.blocks import MOST_BYTES_K, STACK_BYTES, count_parts
from tinygrad_nv.cpu.gemm.layout import kind_of, orient
from tinygrad_nv.cpu.gemm.schedules import CPUGemm, default
from tinygrad_nv.cpu.isa import AVX2, AVX512, AVX512_BF16, ISA, PORTABLE
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile.expression import Sum
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.spec import GemmSpec

# vectors of 16 lanes, pairs and quads in plain C: what any machine runs
PLAIN = ISA("avx512", bf16=True, vnni=True, emulated=True)
BEST = LEVELS[-1]
F32, BF16, F16, S8, U8 = dtypes.float32, dtypes.bfloat16, dtypes.float16, dtypes.int8, dtypes.uint8


def scheduled(spec: GemmSpec, level: ISA = BEST, threads: int = 2, **changes: int) -> CPUGemm:
    """The default of a level, but of blocks so small that small products have several; with changes."""
    target = CPU(level, threads, 32 << 10, 1 << 20)
    made = gemm.default(spec, target)
    assert gemm.problems(spec, made) == []
    small = {"parts": 3, "block_m": 2 * made.rows, "block_n": min(made.block_n, 2 * made.columns),
             "block_k": min(made.block_k, 4 * level.lanes)}
    return replace(made, **(small | changes))


def check(spec: GemmSpec, level: ISA = BEST, m: int | None = None, **changes: int) -> None:
    """Integers come out exactly, nothing beside them is written, nothing behind an operand is read."""
    given = arguments(spec)
    kernel = load(gemm.build(spec, scheduled(spec, level, **changes)))
    got = run(kernel, spec, given, order=range(kernel.kernel.parts)[::-1], m=m)
    assert torch.equal(got, reference(spec, given)[..., :spec.m if m is None else m, :])


# **** integers ****

@pytest.mark.sampled(5)
@pytest.mark.parametrize("level", [*LEVELS, PLAIN], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, S8], ids=["f32", "bf16", "s8"])
def test_every_level_and_what_is_left_at_edges(level: ISA, dtype):
    check(product(45, 83, 151, dtype, gap=3), level)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("dtype", "majors"), list(pairs((F32, BF16, U8), ("KM", "MK", "MM"))), ids=str)
def test_every_major(dtype, majors: str): check(product(37, 50, 90, dtype, majors=majors, gap=1))


STRIDED, SHARED = product(20, 34, 40, BF16), product(20, 33, 40, F32, batch=(3,))
CASES = {
    "float16": product(33, 40, 70, F16), "bfloat16 to float32": product(33, 40, 70, BF16, out=F32),
    "e4m3": product(20, 40, 33, dtypes.fp8e4m3, out=F32),
    "e5m2": product(20, 40, 33, dtypes.fp8e5m2, out=F32),
    "s8 u8": replace(product(33, 40, 99, S8), b=product(33, 40, 99, U8).b),
    "u8 s8": replace(product(33, 40, 99, U8), b=product(33, 40, 99, S8).b),
    "batch of three dimensions": product(20, 33, 40, F32, batch=(2, 1, 3), gap=1),
    "one b for all of a batch": replace(SHARED, b=replace(SHARED.b, batch=(0,))),
    "no major": replace(STRIDED, a=replace(STRIDED.a, mn=100, k=2), b=replace(STRIDED.b, mn=2, k=70)),
    "one row": product(1, 70, 90, F32), "one column": product(70, 1, 90, F32),
    "k of one": product(40, 50, 1, BF16),
    "rows of the result side by side": product(50, 33, 64, F32, out_major="M"),
    "an offset": product(32, 32, 64, F32, offset=5)}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("spec", CASES.values(), ids=CASES)
def test_a_form(spec: GemmSpec): check(spec)


@pytest.mark.parametrize("level", [AVX512, PORTABLE], ids=str)
def test_bytes_widened_to_float32_are_exact_for_the_largest(level: ISA):
    """Sums of 255 · 255, more of them than float32 holds: a block of k is as long as it may be."""
    if level not in LEVELS: level = PORTABLE
    spec = product(3, 20, 1111, U8)
    target = CPU(level, 1, 1 << 20, 8 << 20)
    made = gemm.default(spec, target)
    assert kind_of(spec, level) == "fma"
    assert 128 < made.block_k <= MOST_BYTES_K
    given = {"out": torch.full((60,), GUARD, dtype=torch.int32),
             "a": torch.full((3333,), 255, dtype=torch.uint8),
             "b": torch.full((22220,), 255, dtype=torch.uint8)}
    given["b"][::7] = 254
    assert torch.equal(run(load(gemm.build(spec, made)), spec, given), reference(spec, given))


@pytest.mark.parametrize(("majors", "times"), [("KK", 1), ("KM", 0)])
def test_the_next_panel_is_fetched_where_it_lies_along_k(majors: str, times: int):
    """32 x 32000 x 512 of float32 took 1.3 times as long when packing waited for memory."""
    spec = product(32, 256, 512, F32, majors=majors)
    assert gemm.build(spec, scheduled(spec)).source.count("__builtin_prefetch(ahead") == times


def test_rows_known_at_launch():
    """One kernel for any number of rows; those that are not there are NaN."""
    spec = product(80, 40, 64, F32, symbolic=True)
    given = arguments(spec)
    kernel = load(gemm.build(spec, scheduled(spec, parts=4)))
    for m in (1, 27, 28, 29, 80):
        assert torch.equal(run(kernel, spec, given, m=m), reference(spec, given)[:m])


@drawn(st.integers(1, 70), st.integers(1, 90), st.integers(1, 300), st.sampled_from(("KK", "KM", "MK", "MM")),
       st.sampled_from((F32, BF16, F16, S8)), st.integers(0, 2), st.sampled_from(LEVELS))
@settings(deadline=None, max_examples=8)
def test_any_extents(m: int, n: int, k: int, majors: str, dtype, gap: int, level: ISA):
    check(product(m, n, k, dtype, majors=majors, gap=gap), level)


@pytest.mark.slow
@drawn(st.integers(1, 300), st.integers(1, 300), st.integers(1, 2000),
       st.sampled_from(("KK", "KM", "MK", "MM")), st.sampled_from((F32, BF16, F16, S8, U8)),
       st.integers(0, 2), st.sampled_from([*LEVELS, PLAIN]),
       st.sampled_from(((), (2,), (2, 1, 3))), st.sampled_from("NM"))
@settings(deadline=None, max_examples=80)
def test_any_extents_and_batches(m: int, n: int, k: int, majors: str, dtype, gap: int, level: ISA,
                                 batch: tuple[int, ...], out_major: str):
    check(product(m, n, k, dtype, majors=majors, gap=gap, batch=batch, out_major=out_major), level)


# **** numbers ****

@pytest.mark.parametrize("epilogue", ["gate", "bias+gelu+residual", "scale"])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_an_epilogue(epilogue: str, kind: str):
    spec = dense(50, 48, 96, kind, epilogue=epilogue)
    given = arguments(spec, integers=False)
    near(spec, given, run(load(gemm.build(spec, scheduled(spec))), spec, given), c=2, extra=2)


@pytest.mark.parametrize(("dtype", "k"), [(F32, 64), (F32, 3000), (BF16, 777), (F16, 777)])
def test_random_numbers(dtype, k: int):
    """An error of at most twice that of float32 sums in order, before the result is rounded."""
    spec = product(40, 40, k, dtype, out=F32)
    given = arguments(spec, integers=False)
    right, plain = reference(spec, given), torch.zeros(40, 40)
    a, b = (given[name].float().view(40, k) for name in "ab")
    for i in range(k): plain += a[:, i, None] * b[:, i]
    made = gemm.default(spec, CPU(BEST, 2))
    error = (run(load(gemm.build(spec, made)), spec, given) - right).abs().max()
    assert error <= 2 * (plain - right).abs().max()


def test_nan_stays_in_its_row_and_column():
    spec = product(40, 40, 97, BF16)
    given = arguments(spec)
    given["a"][3 * 97 + 5] = torch.nan
    given["b"][7 * 97 + 96] = torch.nan
    got = run(load(gemm.build(spec, scheduled(spec))), spec, given).isnan()
    assert got.sum() == 79
    assert got[3].all()
    assert got[:, 7].all()


# **** schedules ****

@drawn(st.integers(1, 5000), st.integers(1, 40000), st.integers(1, 20000), st.sampled_from((F32, BF16, S8)),
       st.sampled_from((PORTABLE, AVX2, AVX512, AVX512_BF16)), st.sampled_from((1, 2, 16, 96)),
       st.sampled_from((128 << 10, 1 << 20, 8 << 20)), st.integers(1, 3))
@settings(deadline=None, max_examples=200)
def test_blocks_fit(m: int, n: int, k: int, dtype, level: ISA, threads: int, l2: int, parts: int):
    """On a thread's stack and in registers, whatever the product and the machine."""
    spec = product(m, n, k, dtype)
    sums = Sum(spec.accumulate)
    for p in range(1, parts): sums = sums + Sum(spec.accumulate, p)
    spec = replace(spec, epilogue=sums.cast(spec.out.dtype), parts=parts, part=n * k)
    target = CPU(level, threads, 32 << 10, l2)
    made = gemm.default(spec, target)
    assert gemm.problems(spec, made) == []
    assert gemm.stack_bytes(orient(spec, level), made) <= STACK_BYTES
    vectors = made.columns // level.lanes
    assert made.rows * vectors + vectors + 1 <= level.registers
    assert made.columns % level.lanes == 0
    assert made.block_m % made.rows == 0
    assert made.block_n % made.columns == 0


def finish_time(tiles: int, parts: int, threads: int) -> int:
    """Returns after how many tiles the last thread is done, where each takes the next part."""
    busy = [0] * threads
    for part in range(parts):
        first = busy.index(min(busy))
        busy[first] += tiles * (part + 1) // parts - tiles * part // parts
    return max(busy)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_end_together(threads: int):
    """12 tiles in 8 parts, as many as two threads may have, take 7 steps, in 6 parts 6."""
    spec, target = dense(512, 2304, 768, "bf16"), CPU(AVX512, threads)
    for tiles in range(1, 100):
        found, least = finish_time(tiles, count_parts(spec, tiles, target), threads), -(-tiles // threads)
        assert found == least if tiles <= 8 * threads else found <= 1.1 * least, (tiles, found, least)
    assert finish_time(12, 8, 2) == 7


def test_gemv_is_for_few_rows_and_for_fewer_of_bytes():
    target = CPU(AVX512_BF16, 2)
    for dtype, m, want in ((F32, 16, "gemv"), (F32, 17, "gemm"), (S8, 4, "gemv"), (S8, 5, "gemm")):
        assert default(product(m, 256, 512, dtype), target).template == want


# **** machine code ****

@pytest.mark.parametrize("level", [AVX2, AVX512, AVX512_BF16], ids=str)
@pytest.mark.parametrize("dtype", [BF16, U8], ids=["bf16", "u8"])
def test_every_level_compiles_anywhere_and_calls_nothing(level: ISA, dtype):
    spec = product(33, 50, 90, dtype)
    made = gemm.default(spec, CPU(level, 2))
    binary = Device["CPU"].renderer.compiler.compile_cached(gemm.build(spec, made).source)
    elf_loader(binary)  # raises for what is undefined
    prefix, opcode = {BF16: (2, 0x52), U8: (1, 0x50)}[dtype]  # VDPBF16PS, VPDPBUSD
    found = [i for i in range(len(binary) - 4) if binary[i] == 0x62 and binary[i + 1] & 7 == 2
             and binary[i + 2] & 0x83 == prefix and binary[i + 4] == opcode]
    assert (len(found) >= made.rows * made.columns // level.lanes) == (level == AVX512_BF16)


# **** through the pattern ****

def test_products_of_a_layer_and_of_its_gradients_are_ours():
    rng = np.random.default_rng(0)
    x, w, g = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((40, 96), (70, 96), (40, 70)))
    tx, tw, tg = (Tensor(each, device="CPU").realize() for each in (x, w, g))
    for made, want in (((tx @ tw.T).relu(), np.maximum(x @ w.T, 0)), (tg @ tw, g @ w), (tg.T @ tx, g.T @ x)):
        told = [each for each in explain(made).kernels if each.template == "gemm"]
        assert len(told) == 1
        assert np.array_equal(made.numpy(), want)


@pytest.mark.parametrize(("last", "parts"), [(32, (3, 16 * 64)), (48, (1, 0))], ids=["even", "uneven"])
def test_three_parts_of_a_weight(last: int, parts: tuple[int, int]):
    """One matmul of three parts where they are evenly apart; else the whole sum is stored first."""
    x, w = (torch.randint(-2, 3, (rows, 64), generator=torch.Generator().manual_seed(rows)).float()
            for rows in (24, last + 16))
    def combined(y): return y[:, :16].relu() * y[:, 16:32] - y[:, last:last + 16]

    x_there, w_there = (Tensor(each.numpy(), device="CPU").realize() for each in (x, w))
    z = combined(x_there @ w_there.T)
    specs = [kernel.spec for kernel in explain(z).kernels if isinstance(kernel.spec, GemmSpec)]
    assert [(spec.parts, spec.part) for spec in specs] == [parts]
    np.testing.assert_array_equal(z.numpy(), combined(x @ w.T).numpy())
