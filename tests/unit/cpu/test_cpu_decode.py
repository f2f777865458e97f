"""Decode attention on the CPU: every level and dtype, both ways to share it out, and what changes no bit."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad import dtypes

from tests.emu.tile.decode.test_decode_invariant import alone, moved
from tests.support.cpu.cpu_decode_case import ISAS, near, on, run
from tests.support.tile.decode_case import contiguous, decode, every_number, requests
from tinygrad_nv.cpu.decode import kernel as template
from tinygrad_nv.cpu.isa import ISA, detect
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.expression import Constant, Load, Position, Sum, tanh, where
from tinygrad_nv.tile.launch import Integer

F32, BF16, F16, S8 = dtypes.float32, dtypes.bfloat16, dtypes.float16, dtypes.int8
E4M3, E5M2 = dtypes.fp8e4m3, dtypes.fp8e5m2
LENGTHS = [640, 1, 0, 257, 300]  # three splits, one, none, two, two


def checked(spec: DecodeSpec, lengths: list[int], isa: ISA | None = None, seed: int = 0,
            **more: Any) -> torch.Tensor:
    """The result, held against float64: by one kernel, and with the same bits by two."""
    made = requests(spec, lengths, seed, **more)
    got = run(spec, made, isa, divided=False)
    near(spec, made, got)
    assert torch.equal(run(spec, made, isa, divided=True, parts=3, order=[2, 0, 1]), got)
    return got


# **** what is computed ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "kv"), [(F32, None), (BF16, None), (F16, S8), (F32, E4M3),
                                           (BF16, E5M2)], ids=str)
@pytest.mark.parametrize("isa", ISAS, ids=str)
def test_levels(isa: ISA, dtype: dtypes, kv: dtypes):
    """Five rows, widths that are no multiple of vectors, a window, gaps."""
    checked(decode(batch=5, heads=2, group=5, d=40, d_v=19, pages=40, dtype=dtype, kv=kv, window=290, gap=1),
            LENGTHS, isa)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_rows(rows: int):
    """Rows before a request's first token see nothing."""
    got = checked(decode(batch=3, group=2, s_q=rows, d=32, page_size=8, pages=3, dtype=F32), [rows, 3, 24])
    assert not got[1, :, :, :max(0, rows - 3)].any()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [8, 64, 256])
def test_edges_of_pages_and_splits(size: int):
    spec = decode(batch=6, d=32, page_size=size, pages=1024 // size, dtype=F32)
    for lengths in ([0, 1, size - 1, size, size + 1, 1024], [255, 256, 257, 511, 512, 513]):
        checked(spec, lengths)


def test_contiguous_caches_and_integers():
    """The length an argument, computed from variables of the launch."""
    for length in (0, 1, 300): checked(contiguous(300, heads=2, group=3, dtype=F32, order="hts"), [length])
    checked(contiguous(300, "most", heads=2, dtype=BF16, order="both"), [300], together=True)
    spec = contiguous(300, dtype=F32)
    (kernel,) = template.build(spec, replace(template.default(spec, on(detect())), divided=False),
                               [Integer(3, (0, 2))]).kernels
    assert "int v0, int v1" in kernel.source
    assert "const int length = 3 + 2 * v1 < 0 ? 0 : 3 + 2 * v1;" in kernel.source


@pytest.mark.slow
def test_scores():
    """A soft-cap, positions, a parameter of rows and keys; rows at one place."""
    sums = tanh(Sum() * 0.05) * 20.0
    spec = contiguous(300, heads=2, group=2, s_q=3, dtype=F32, score=sums + Load(0, F32, 300, 1, (0, 900, 0)))
    checked(spec, [300])
    apart = (Position("m") - Position("n")).cast(F32) * -0.1
    checked(contiguous(300, s_q=3, dtype=F32, score=sums + apart), [211])
    even = where(Position("n").cast(F32) < 100.0, Sum() * 0.1, -float("inf"))
    checked(contiguous(300, s_q=3, dtype=F32, causal=False, score=even), [211])


def test_splits_that_no_query_sees():
    """The first one, or all of them."""
    late = where(Constant(280.0, F32) < Position("n").cast(F32), Sum() * 0.1, -float("inf"))
    spec = contiguous(300, s_q=3, dtype=F32, causal=False, score=late)
    checked(spec, [300])
    assert not checked(spec, [270]).any()


@pytest.mark.parametrize("kv", [S8, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("isa", ISAS, ids=str)
def test_every_byte_is_its_number(isa: ISA, kv: dtypes):
    """One visible key: its value times its scale, a power of two, bit for bit."""
    spec, made, wanted = every_number(kv, F32)
    assert torch.equal(run(spec, made, isa).reshape(256), wanted)


def test_very_large_scores():
    checked(contiguous(300, dtype=F32, score=Sum() * 1e30), [300])


def test_nan_of_a_seen_key_reaches_its_rows_alone():
    spec = contiguous(300, heads=2, s_q=2, dtype=F32, order="hts")
    made = requests(spec, [280])
    made.storages["k"][279 * 64] = torch.nan  # of the first head, seen by the last row
    got = run(spec, made)
    assert got[0, 0, 0, 1].isnan().all()
    assert not got[0, 0, 0, 0].isnan().any()
    assert not got[0, 1].isnan().any()


# **** what changes no bit ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize("kv", [None, S8], ids=str)
def test_bits_are_those_of_the_request(kv: dtypes):
    """Pages anywhere, parts, their order, a request by itself, a shorter table."""
    spec = decode(batch=5, heads=2, group=4, s_q=2, pages=40, dtype=F32, kv=kv)
    made = requests(spec, LENGTHS)
    got = run(spec, made)
    for seed in range(2): assert torch.equal(run(spec, moved(spec, made, seed)), got)
    for parts in (1, 2, 7): assert torch.equal(run(spec, made, parts=parts), got)
    for divided in (False, True):
        assert torch.equal(run(spec, made, divided=divided, parts=4, order=[3, 1, 0, 2]), got)
    for b in (0, 1, 3):
        one, mine = alone(spec, made, b, max(1, -(-LENGTHS[b] // 16)))
        assert torch.equal(run(one, mine)[0], got[b])


def test_rows_do_not_depend_on_each_other():
    spec = contiguous(300, group=5, dtype=F32)
    made = requests(spec, [300])
    got = run(spec, made)
    made.storages["q"][:128] *= 3  # of the first two heads
    assert torch.equal(run(spec, made)[:, :, 2:], got[:, :, 2:])


# **** schedules, and what is refused ****

def test_keys_are_divided_where_heads_are_few():
    four = replace(on(detect()), threads=4)
    for heads, divided in ((1, 1), (4, 0), (5, 1), (32, 0)):
        schedule = template.default(decode(heads=heads, pages=64), four)
        assert (schedule.divided, schedule.parts) == (divided, min(16, heads * (4 if divided else 1)))
    assert template.default(decode(heads=1, pages=8), four).divided is False


def test_what_does_not_fit_the_stack():
    spec = decode(group=200, s_q=8, d=256)
    (words,) = template.problems(spec, template.default(spec, on(detect())))
    assert words.startswith("1600 rows of 256 + 2 x 256 + 256 numbers: ")


@st.composite
def specs(draw: st.DrawFn) -> tuple[DecodeSpec, list[int]]:
    kv = draw(st.sampled_from([None, S8, E4M3, E5M2]))
    d, d_v = (draw(st.integers(1, 70)) for _ in range(2))
    size, batch, longest = draw(st.sampled_from([8, 32])), draw(st.integers(1, 3)), draw(st.integers(1, 600))
    lengths = [draw(st.integers(0, longest)) for _ in range(batch)]
    return decode(batch, draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 8)), d, size,
                  -(-longest // size), draw(st.sampled_from([F32, BF16, F16])), kv, d_v,
                  draw(st.one_of(st.none(), st.integers(1, 300))), None,
                  draw(st.sampled_from(["ths", "hts"])), draw(st.sampled_from(["brh", "bhr"]))), lengths


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True)
@given(case=specs(), isa=st.sampled_from(ISAS), seed=st.integers(0, 7))
def test_generated(case: tuple[DecodeSpec, list[int]], isa: ISA, seed: int):
    checked(case[0], case[1], isa, seed)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(case=specs(), isa=st.sampled_from(ISAS), seed=st.integers(0, 7))
def test_generated_at_length(case: tuple[DecodeSpec, list[int]], isa: ISA, seed: int):
    checked(case[0], case[1], isa, seed)


def test_the_comparison_can_fail():
    spec = contiguous(40, dtype=F32)
    made = requests(spec, [40])
    got = run(spec, made)
    with pytest.raises(AssertionError, match="above the bound"): near(spec, made, got * 1.00001)
