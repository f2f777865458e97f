"""Attention's backward pass on the CPU, against the exact gradients: instruction sets, dtypes, layouts,
bands, scores, dropout, extents of a launch; and that no bit depends on the parts."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import DType, dtypes

from tests.emu.tile.attention.test_flash_backward_generated import specs
from tests.emu.tile.attention.test_flash_backward_scores import scores
from tests.support.cpu.cpu_backward_case import close, here, run, scheduled
from tests.support.tile.attention_case import attended, matrix
from tests.support.tile.backward_case import arguments, backward, given_forward, lies, near, reference
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.attention.backward import kernel as flash_backward
from tinygrad_nv.cpu.attention.score import dropout_text
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import kernel
from tinygrad_nv.errors import SpecError
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.dropout import keeps
from tinygrad_nv.tile.attention.spec import SCALED, Band, RowScales
from tinygrad_nv.tile.expression import Position, Sum, tanh

F32, F16, BF16 = dtypes.float32, dtypes.float16, dtypes.bfloat16
CAUSAL = Band(None, 0)
SCORES = scores(50)
LEVELS = [one for one in (isa.PORTABLE, isa.AVX2, isa.AVX512, isa.AVX512_BF16)
          if one.level not in ("avx2", "avx512") or not isa.why_not(one.level)]
HEADS = st.one_of(st.sampled_from([32, 64, 96, 128]), st.integers(1, 100))
Case = tuple[BackwardSpec, dict[str, int]]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_levels(level: ISA, dtype: DType):
    """Heads of no whole vectors, rows and keys that end within tiles, several blocks of each."""
    spec = backward(110, 150, 24, dtype, batch=2, heads=2, group=2, band=Band(-60, 30), start=20, d_v=37,
                    order="brh", gap=3)
    close(spec, scheduled(spec, level, block_m=48, block_n=64))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str):
    """Rows may see nothing."""
    close(backward(70, 50, 16, F32, batch=2, heads=2, group=2, band=CAUSAL, score=SCORES[name]))


def test_few_heads_are_divided_among_many_threads():
    """A head for two threads is divided, eight heads are not."""
    for heads, threads, divided in ((1, 2, True), (3, 2, False), (8, 2, False), (8, 6, True), (1, 1, False)):
        spec = backward(512, 512, 64, F32, heads=heads, band=CAUSAL)
        assert (flash_backward.default(spec, here(threads=threads)).parts > heads) == divided


@pytest.mark.parametrize("d", [64, 256])
def test_scratch_memory_is_as_large_as_is_said(d: int):
    spec = backward(8, 8, d, F32)
    schedule = flash_backward.default(spec, here())
    said = flash_backward.stack_bytes(spec, schedule.block_m, schedule.block_n)
    assert said <= flash_backward.STACK_BYTES
    text = flash_backward.build(spec, schedule).source.partition("typedef struct {")[2].partition("}")[0]
    sizes = [int(word.partition("[")[2].partition("]")[0]) for word in text.split(";") if "float" in word]
    assert 0.9 * said <= 4 * sum(sizes) <= said


def test_blocks_of_any_size():
    for m, n in ((6, 64), (200, 192), (50, 128)):
        spec = backward(230, 200, 64, F32, band=CAUSAL, heads=2)
        close(spec, scheduled(spec, block_m=m, block_n=n))


def test_large_scores():
    """Weights are as good as 0 and 1; nothing overflows."""
    close(backward(70, 50, 16, F32, score=Sum() * 8.0), scale=8.0)
    for dtype in (F16, F32): close(backward(70, 50, 16, dtype, score=tanh(Sum() * 4.0) * 300.0), scale=8.0)


@pytest.mark.parametrize("size", [2.0**14, 2.0**60])
def test_scores_beyond_all_exponents(size: float):
    """Sums of 2^34 and 2^126, whose roundings are many powers of two: no gradient is of their size."""
    spec = backward(64, 128, 64, F32, score=Sum() * 0.1)
    memory = arguments(spec)
    for name in ("q", "k"): memory[name].copy_(memory[name].sign() * size)
    given_forward(spec, memory)
    near(spec, memory, run(spec, memory))


def test_rows_that_see_nothing_have_no_share():
    """By a mask in memory: their l is −inf, whatever grad they have."""
    spec = backward(70, 50, 16, F32, score=SCORES["mask"])
    memory = arguments(spec)
    mask = memory["x0"].view(70, 50)
    mask[5] = mask[40:64] = False
    given_forward(spec, memory)
    assert (lies(spec, memory, "l") == -torch.inf).sum() == 25
    got = run(spec, memory)
    near(spec, memory, got)
    assert (got.dq[..., 40:64, :] == 0).all()


def test_keys_that_no_row_sees_do_not_matter():
    """Before and after a window they are NaN; their gradients are 0."""
    spec = backward(40, 230, 16, F32, band=Band(-50, 0), start=120)
    memory = arguments(spec)
    spoilt = {name: storage.clone() for name, storage in memory.items()}
    hidden = [*range(70), *range(160, 230)]
    for name in "kv": matrix(spec.forward, spoilt, name)[:, :, :1, hidden] = torch.nan
    for parts in (1, 5):
        got = run(spec, spoilt, scheduled(spec, block_n=64, parts=parts))
        near(spec, memory, got)
        assert (got.dk[..., 160:, :] == 0).all()
        assert (got.dv[..., :70, :] == 0).all()


def test_nan_of_a_key_reaches_the_rows_that_see_it():
    spec = backward(40, 40, 16, F32, band=CAUSAL)
    memory = arguments(spec)
    matrix(spec.forward, memory, "k")[..., 30, :] = torch.nan
    got = run(spec, memory)
    assert got.dq[..., 30:, :].isnan().all()
    assert not got.dq[..., :24, :].isnan().any()


def test_finite_differences():
    """The loss Σ out · grad of the exact forward, changed along the gradient of each operand in turn."""
    spec = backward(40, 50, 16, F32, heads=1, group=2, band=Band(None, 20), score=SCORES["soft-cap"])
    memory = arguments(spec)
    got = run(spec, memory)

    def loss(name: str, step: float, along: torch.Tensor) -> float:
        moved = {one: memory[one].double() for one in (*"qkv", "grad")}
        there = matrix(spec.forward, moved, name)[:, :, :along.shape[2]]
        there += step * along
        out, _ = attended(spec.forward, memory | moved, torch.float64)
        return float((out * lies(spec, moved, "grad")).sum())

    for name, gradient in zip("qkv", got, strict=True):
        along = gradient if name == "q" else gradient.unsqueeze(2)[:, :, :1]
        slope = (loss(name, 0.01, along) - loss(name, -0.01, along)) / 0.02
        assert abs(slope - float((gradient ** 2).sum())) < 1e-3 * abs(slope)


def test_one_key():
    """p is 1, so that dv is the sum of grad, exactly, and dq and dk are 0."""
    spec = backward(40, 1, 16, F32)
    memory = arguments(spec)
    lies(spec, memory, "grad").copy_(torch.arange(-320, 320).view(1, 1, 1, 40, 16) / 64)
    given_forward(spec, memory)
    got = run(spec, memory)
    assert torch.equal(got.dv, reference(spec, memory).dv.float().double())
    near(spec, memory, got)


def test_operands_and_scores_that_have_no_backward_pass():
    spec = backward(8, 8, 8, F32, score=Position("n").cast(F32) + Sum().cast(dtypes.int32).cast(F32))
    assert flash_backward.problems(spec, scheduled(spec)) == ["the derivative of sum.s32"]
    one = backward(8, 8, 8, F32).forward
    q, k, v = (replace(rows, dtype=SCALED) for rows in (one.q, one.k, one.v))
    scaled = replace(one, q=q, k=k, v=v, scales=(RowScales(), RowScales(), RowScales()))
    with pytest.raises(SpecError, match="the backward pass of e4m3"): BackwardSpec(scaled, q, k, v)


# **** dropout ****

@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_what_is_dropped(level: ISA):
    """Bytes of a block of rows and columns, as the reference has them."""
    text = "draw(bytes, 200, rows, row, 128, column, matrix, seed);"
    made = kernel("drawn", level, text, [("u8", "bytes")], [("u32", "seed")],
                  ["rows", "row", "column", "matrix"], before=dropout_text())
    seed, got = np.array([0x9E3779B9, 17], np.uint32), np.zeros((21, 200), np.uint8)
    load(made)(got, seed, 21, 70, 192, 3)
    row, column = np.arange(70, 91, dtype=np.uint64)[:, None], np.arange(192, 320, dtype=np.uint64)
    for kept in (1, 77, 255):
        right = keeps(row, column, np.uint64(3), seed.astype(np.uint64), kept)
        assert ((got[:, :128] < kept) == right).all()
    assert (got[:, 128:] == 0).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("parts", [2, 9])
def test_dropout(parts: int):
    spec = backward(150, 200, 32, F32, heads=2, group=2, kept=150, band=Band(-70, 30), start=20,
                    score=SCORES["soft-cap"], symbolic=("s_q", "start"))
    close(spec, scheduled(spec, block_n=64, parts=parts), s_q=130, start=3)


# **** any ****

ANY = given(specs((F32, F32, BF16, F16), HEADS), st.sampled_from(LEVELS), st.integers(1, 9),
            st.sampled_from([64, 128]))


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@ANY
def test_generated(case: Case, level: ISA, parts: int, block_n: int):
    spec, extents = case
    close(spec, scheduled(spec, level, parts=parts, block_n=block_n), **extents)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@ANY
def test_generated_widely(case: Case, level: ISA, parts: int, block_n: int):
    spec, extents = case
    close(spec, scheduled(spec, level, parts=parts, block_n=block_n), **extents)
