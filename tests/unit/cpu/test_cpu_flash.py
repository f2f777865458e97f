"""Attention on the CPU: every level and dtype, parts, masks from memory, dropout, ragged batches, 8 bits;
generated cases; and in graphs, which spec is found and by which template, within twice the error of
float32 arithmetic of the same dtypes."""
from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad import dtypes
from tinygrad.dtype import DType

from tests.emu.tile.attention.test_flash_generated import EDGE, KEYS, ROWS, scores
from tests.support.cpu.cpu_flash_case import BEST, LEVELS, Answer, close, loaded, run, same, scheduled
from tests.support.patterns.attention_graph import attended, by_hand
from tests.support.tile import ragged_case
from tests.support.tile.attention_case import arguments, attention, keep, matrix, near
from tests.support.tile.flash_fp8_case import attention8
from tests.support.tile.ragged_case import ragged
from tinygrad_nv import Tensor, TinyJit, Variable, explain
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.attention import flash
from tinygrad_nv.cpu.attention.flash import CPUFlash
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.functional import scaled_dot_product_attention, varlen_attention
from tinygrad_nv.tile.attention.spec import SYMBOLS, AttentionSpec, Band
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, Position, Sum, tanh, where

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16
CAUSAL = Band(last=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_levels(level: isa.ISA, dtype: DType):
    """Three blocks of columns, tails of rows, of columns and of both heads' widths; two query heads of a key
    head in a tile."""
    spec = attention(50, 150, 37, dtype, 1, 2, 2, Band(-120, 3), start=90, d_v=19, lse=True, gap=3)
    close(spec, scheduled(spec, level))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_wide_heads_in_turned_order(dtype: DType):
    close(attention(40, 130, 256, dtype, 2, 2, 3, CAUSAL, start=90, d_v=200, order="brh", lse=True))


def test_tiles_of_several_heads():
    spec = attention(150, 150, 64, F32, 1, 2, 3, CAUSAL, lse=True)
    close(spec, scheduled(spec, rows=24, heads=2))


def test_one_kernel_of_all_extents():
    """Rows, keys and the place of row 0 are a launch's: none of them beyond what it says is read."""
    spec = attention(40, 200, 32, BF16, 2, 1, 2, CAUSAL, start=160, symbolic=SYMBOLS, lse=True)
    given, kernel = arguments(spec), loaded(spec)
    for s_q, s_kv, start in ((40, 200, 160), (1, 1, 0), (7, 64, 57), (13, 65, 70), (40, 130, 90)):
        extents = {"s_q": s_q, "s_kv": s_kv, "start": start}
        near(spec, given, run(kernel, spec, given, **extents), **extents)


def test_bands_begin_and_end_anywhere_in_a_vector():
    """Where a mask is left out for the rows at hand, each of them sees all of the columns."""
    for band in (Band(None, 2), Band(-20, None)):
        spec = attention(7, 96, 16, F32, band=band, symbolic=SYMBOLS, lse=True)
        given, kernel = arguments(spec), loaded(spec)
        for start in range(56, 96):
            extents = {"s_q": 7, "s_kv": 96, "start": start}
            near(spec, given, run(kernel, spec, given, **extents), **extents)


def replace_start(node: Expression) -> Expression:
    """30 as the place of row 0."""
    if node == Constant(30, dtypes.int32): return Position("start")
    return replace(node, args=tuple(map(replace_start, node.args))) if isinstance(node, Apply) else node


def test_scores():
    """A soft cap, slopes by head and distance, a mask of floats and one of booleans."""
    n, rows = 90, 50
    distance = (Position("n") - Position("m") - 30).cast(F32)
    slope = Load(0, F32, 0, 0, (0, 2, 1))
    added = Load(1, BF16, n, 1, (rows * n, 0, 0)).cast(F32)
    seen = Load(2, dtypes.bool, 0, 1, (n, 0, 0))
    score = where(seen, tanh(Sum() * (0.2 / 8)) * 8.0 + distance * slope * 0.02 + added, -math.inf)
    for level in (LEVELS[0], BEST):
        spec = attention(rows, n, 32, F32, 2, 2, 2, score=score, start=30, lse=True)
        close(spec, scheduled(spec, level))
    moved = replace(spec, score=replace_start(score))
    given = arguments(spec)
    same(run(loaded(spec), spec, given), run(loaded(moved), moved, given))
    given["x2"].zero_()
    out, l = run(loaded(spec), spec, given)
    assert l is not None
    assert (out == 0).all()
    assert (l == -torch.inf).all(), "rows that see nothing"


def test_integers_are_exact():
    """Equal scores and weights of 1 / 2ⁿ: a mean of integers."""
    spec = attention(20, 64, 16, F32, heads=2)
    given = arguments(spec)
    given["q"].zero_()
    given["v"].copy_(torch.randint(-8, 8, given["v"].shape).float())
    out, _ = run(loaded(spec), spec, given)
    assert torch.equal(out, matrix(spec, given, "v").double().mean(-2, keepdim=True).expand_as(out))


def test_what_is_no_number_stays_none():
    """A NaN in a row of q is that row's alone; one in a value is that of who sees it."""
    spec = attention(30, 30, 16, F32, band=CAUSAL, lse=True)
    given = arguments(spec)
    matrix(spec, given, "q")[0, 0, 0, 7, 3] = torch.nan
    out, l = run(loaded(spec), spec, given)
    assert l is not None
    assert out.isnan().any(-1).nonzero()[:, -1].tolist() == [7]
    assert l.isnan().nonzero()[:, -1].tolist() == [7]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kept", [1, 100, 255])
def test_what_is_dropped(kept: int):
    """Element for element: of equal scores, with a one in the row of each value. l is what it is without."""
    spec = replace(attention(70, 200, 16, F32, 2, 2, 1, d_v=200, lse=True), kept=kept)
    given = arguments(spec)
    given["q"].zero_()
    matrix(spec, given, "v")[:, :, 0].copy_(torch.eye(200))
    out, l = run(loaded(spec), spec, given)
    expected = keep(spec, given, 70, 200) / 200
    assert ((out != 0) == (expected != 0)).all()
    assert ((out - expected).abs() <= 2.0**-21 * expected).all()
    assert l is not None
    assert (l - math.log(200)).abs().max() < 1e-5


def ragged_answer(case: ragged_case.Case, given: ragged_case.Given) -> list[Answer]:
    memory = {name: given[name].clone() for name in ragged_case.order(case.spec)}
    for name, begin in zip("qkv", (case.begins[0], case.begins[1], case.begins[1]), strict=True):
        row = getattr(case.spec, name).row
        memory[name][:begin[0] * row], memory[name][begin[-1] * row:] = torch.nan, torch.nan
    loaded(case.spec)(*(x.view(torch.uint8).numpy() for x in memory.values()))
    return ragged_case.results(case, {name: memory[name] for name in ("out", "l") if name in memory})


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_ragged_batches(dtype: DType):
    lengths = [(7, 7), (0, 5), (33, 90), (4, 0), (64, 64), (1, 70), (20, 3)]
    case = ragged(lengths, 32, dtype, 2, 2, CAUSAL, slack=2, more=5)
    given = ragged_case.arguments(case)
    ragged_case.near(case, given, ragged_answer(case, given))


@pytest.mark.parametrize("block", [0, 32])
def test_eight_bits(block: int):
    spec = attention8(40, 130, 48, (block,) * 3, heads=2, group=2, band=CAUSAL, start=90, lse=True)
    close(spec)


def test_what_is_refused_is_said():
    spec = attention(8, 8, 16, F32, score=Apply("sin", (Sum(),), F32))
    assert flash.problems(spec, flash.default(spec, CPU(BEST, 2))) == ["sin in an epilogue"]


def test_tiles_are_small_enough_for_all_threads_and_large_enough_to_share_blocks():
    def tiles(spec: AttentionSpec, threads: int) -> int:
        made = flash.default(spec, CPU(BEST, threads))
        assert made.rows * made.heads <= flash.TILE_ROWS
        b, heads, group = spec.batch
        return b * heads * -(-group // made.heads) * -(-spec.s_q // made.rows)
    assert tiles(attention(1024, 1024, 64, F32, heads=1), 2) >= 8
    assert tiles(attention(16, 16, 64, F32, heads=1, group=8), 4) >= 4
    assert tiles(attention(16, 16, 64, F32, heads=8), 2) == 8


# **** generated cases ****


HEADS = st.one_of(st.sampled_from([16, 32, 64, 128]), st.integers(1, 90))
Case = tuple[AttentionSpec, dict[str, int]]


@st.composite
def specs(draw: st.DrawFn) -> Case:
    """An attention, and the extents of a launch that its symbolic ones have."""
    s_q, s_kv, d = draw(ROWS), draw(KEYS), draw(HEADS)
    dtype = draw(st.sampled_from([dtypes.float32, dtypes.bfloat16, dtypes.float16]))
    batch, heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 5))
    band = draw(st.sampled_from([Band(), Band(None, 0), Band(draw(EDGE), draw(EDGE))]))
    start = draw(st.one_of(st.just(0), st.integers(0, 150)))
    symbolic = tuple(name for name in SYMBOLS if draw(st.integers(0, 3)) == 0)
    spec = attention(s_q, s_kv, d, dtype, batch, heads, group, band, draw(scores(s_q, s_kv, heads, group)),
                     start, draw(st.sampled_from([d, d, 64, 37])),
                     draw(st.sampled_from([dtype, dtypes.float32])),
                     draw(st.sampled_from(["bhr", "brh"])), draw(st.sampled_from([0, 0, 1, 2, 4])), symbolic,
                     draw(st.booleans()))
    most = {"s_q": (0, s_q), "s_kv": (0, s_kv), "start": (0, start)}
    return spec, {name: draw(st.integers(*most[name])) for name in symbolic}


def check(case: Case, level: ISA, block_n: int, parts: int, seed: int) -> None:
    """Near the exact answer, and the same bits in any number of parts, taken in any order."""
    spec, extents = case
    memory, schedule = arguments(spec, seed), scheduled(spec, level, block_n=block_n)
    got = run(loaded(spec, schedule), spec, memory, **extents)
    if 0 not in (extents.get("s_q"), extents.get("s_kv")): near(spec, memory, got, **extents)
    elif extents.get("s_q"): assert (got[0] == 0).all()
    if parts:
        divided = loaded(spec, scheduled(spec, level, block_n=block_n, parts=parts))
        same(got, run(divided, spec, memory, order=range(parts)[::-1], **extents))


LEVEL, BLOCK_N = st.sampled_from(LEVELS), st.sampled_from([64, 64, 32, 128])


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(specs(), LEVEL, BLOCK_N, st.integers(0, 3))
def test_generated(case: Case, level: ISA, block_n: int, seed: int): check(case, level, block_n, 0, seed)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(specs(), LEVEL, BLOCK_N, st.integers(0, 7), st.integers(0, 3))
def test_generated_more(case: Case, level: ISA, block_n: int, parts: int, seed: int):
    check(case, level, block_n, parts, seed)


# **** graphs ****


TORCH = {F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16}
UNIT = {F32: 2.0**-24, BF16: 2.0**-8, F16: 2.0**-11}
B, H, T, S, D = 2, 4, 80, 96, 64  # more rows than a decode kernel takes
def of(*shape: int, dtype: DType = F32, seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return Tensor(values, device="CPU").cast(dtype).realize()


def operands(heads: int = H, dtype: DType = F32, rows: int = T, keys: int = S) -> tuple[Tensor, ...]:
    return of(B, H, rows, D, dtype=dtype), of(B, heads, keys, D, dtype=dtype, seed=1), \
        of(B, heads, keys, D, dtype=dtype, seed=2)


def found(*tensors: Tensor) -> AttentionSpec:
    """The spec of the one kernel that makes the tensors, by our template."""
    (kernel,) = explain(*tensors).kernels
    assert isinstance(kernel.spec, AttentionSpec), kernel.reason
    assert isinstance(kernel.schedule, CPUFlash)
    assert kernel.template == "flash"
    return kernel.spec


def wide(x: Tensor) -> torch.Tensor: return torch.from_numpy(x.float().numpy()).double()


def within(out: Tensor, dtype: DType, *given: Tensor, mask: torch.Tensor | None = None, **how: Any) -> None:
    """Twice the error of scores and softmax in float32 with weights of the dtype, the result's rounding, and
    that of scores where a row has few columns."""
    q, k, v = map(wide, given)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **how)
    scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(D)
    if how.get("is_causal"):
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), -torch.inf)
    if mask is not None: scores = scores + mask.float()
    plain = (scores.softmax(-1).to(TORCH[dtype]).float() @ v.float()).double()
    top = scores[scores > -1e30].abs().max()
    bound = 2 * (plain - exact).abs().max() + (UNIT[dtype] + 2.0**-23 * (1 + top)) * exact.abs()
    assert ((wide(out) - exact).abs() <= bound).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_method_and_by_hand(causal: bool, dtype: DType):
    given = operands(2, dtype, S)
    out = given[0].scaled_dot_product_attention(*given[1:], is_causal=causal, enable_gqa=True)
    spec = found(out)
    assert (spec.matrices, spec.s_q) == (B * H, S)
    assert (spec.band, spec.q.dtype) == (CAUSAL if causal else Band(), dtype)
    within(out, dtype, *given, is_causal=causal)
    q, k, v = operands(dtype=dtype)
    assert found(by_hand(q, k, v)).s_kv == S


def test_masks():
    q, k, v = operands()
    keys = Tensor(np.arange(S) < 70, device="CPU").realize()
    mask = of(B, 1, T, S, seed=3)
    out = q.scaled_dot_product_attention(k, v, attn_mask=mask)
    found(out)
    within(out, F32, q, k, v, mask=wide(mask))
    hidden = q.scaled_dot_product_attention(k, v, attn_mask=keys.reshape(1, 1, 1, S).expand(B, 1, T, S))
    found(hidden)
    within(hidden, F32, q, k, v,
           mask=torch.where(torch.arange(S) < 70, 0.0, -torch.inf).double().expand(T, S))


def test_the_mask_of_transformers():
    """−3.4e38 where a row may not look, added; causal with a cache of 16 tokens."""
    q, k, v = operands()
    at, column = torch.arange(T)[:, None] + S - T, torch.arange(S)
    added = torch.where(column <= at, 0.0, torch.finfo(torch.float32).min)[None, None]
    mask = Tensor(added.numpy(), device="CPU").realize()
    scores = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(D)) + mask
    out = attended(scores, v)
    found(out)
    within(out, F32, q, k, v, mask=added.double())


def test_rows_of_a_cache_are_arguments():
    """A chunk of a prompt: where it stands varies, the kernel is one."""
    cache = of(2, B, 2, 128, D)
    begin = Variable("begin", 0, 40)

    @TinyJit
    def step(q: Tensor, at: Any) -> Tensor:
        k, v = (cache[i][:, :, :at + T] for i in range(2))
        row = Tensor.arange(T).reshape(T, 1) + at
        mask = Tensor.arange(128).reshape(1, 128)[:, :at + T] <= row
        return q.scaled_dot_product_attention(k, v, attn_mask=mask, enable_gqa=True).realize()
    for place in (0, 3, 40, 7):
        q = of(B, H, T, D, seed=place)
        keys = cache[:, :, :, :place + T].contiguous().realize()
        row = torch.arange(T)[:, None] + place
        mask = torch.where(torch.arange(place + T) <= row, 0.0, -torch.inf).double()
        within(step(q, begin.bind(place)), F32, q, keys[0], keys[1], mask=mask)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_gradients(dtype: DType):
    """The forward pass is ours, with l; what has no kernel for the gradient falls back to the body."""
    given = operands(2, dtype, S)
    loss = scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True).float().square().sum()
    made = loss.gradient(*given)
    theirs = [wide(x).requires_grad_() for x in given]
    k, v = (x.repeat_interleave(2, 1) for x in theirs[1:])
    right_out = torch.nn.functional.scaled_dot_product_attention(theirs[0], k, v, is_causal=True)
    right_out.square().sum().backward()
    for mine, right in zip(made, theirs, strict=True):
        assert right.grad is not None
        assert (wide(mine) - right.grad).abs().max() <= 40 * UNIT[dtype] * right.grad.abs().max()


def test_ragged_batches_by_name():
    lengths = [50, 0, 65, 33]
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    q, k, v = of(160, H, D), of(160, 2, D, seed=1), of(160, 2, D, seed=2)
    cu = Tensor(ends, device="CPU").realize()
    out = varlen_attention(q, k, v, cu, cu, 70, 70, causal=True)
    assert found(out).total == (160, 160)
    for first, last in itertools.pairwise(ends):
        if first == last: continue
        parts = [x[int(first):int(last)].transpose(0, 1).unsqueeze(0) for x in (out, q, k, v)]
        within(*parts[:1], F32, *parts[1:], is_causal=True)
    assert (out.numpy()[ends[-1]:] == 0).all()


def test_what_is_left_says_why():
    q, k, v = (of(1, 1, 8, 300) for _ in range(3))
    kernels = explain(by_hand(q, k, v))
    assert not any(isinstance(kernel.spec, AttentionSpec) for kernel in kernels.kernels)
    assert "at most 256" in "; ".join([*(kernel.reason for kernel in kernels.kernels), *kernels.notes])


@pytest.mark.parametrize("part", ["factor", "term"])
def test_a_variable_as_a_float_in_scores(part: str):
    q, k, v = operands()
    n = Tensor(Variable("n", 1, 9).bind(3)).cast(F32)
    x = q @ k.transpose(-1, -2)
    out = attended(x * (n * 0.04) if part == "factor" else x * 0.12 + n * -0.01 * Tensor.arange(S), v)
    assert isinstance(found(out), AttentionSpec)
    scores = wide(q) @ wide(k).transpose(-1, -2) * 0.12
    if part == "term": scores += torch.arange(S) * -0.03
    np.testing.assert_allclose(out.numpy(), scores.softmax(-1) @ wide(v), rtol=1e-5, atol=1e-5)


def test_scores_in_integers_that_wrap():
    q, k, v = operands()
    places = (Tensor.arange(S) + 200).cast(dtypes.uint8)
    out = attended(q @ k.transpose(-1, -2) * 0.12 + places.cast(F32) * 0.01, v)
    scores = wide(q) @ wide(k).transpose(-1, -2) * 0.12 + (torch.arange(S) + 200) % 256 * 0.01
    np.testing.assert_allclose(out.numpy(), scores.softmax(-1) @ wide(v), rtol=1e-5, atol=1e-5)
