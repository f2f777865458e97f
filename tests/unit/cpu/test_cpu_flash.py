"""Attention on the CPU: every level and dtype, parts, masks from memory, dropout, ragged batches, 8 bits, and
what a kernel may not need."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tinygrad import dtypes
from tinygrad.dtype import DType

from tests.support.cpu.cpu_flash_case import BEST, LEVELS, Answer, close, loaded, run, same, scheduled
from tests.support.tile import ragged_case
from tests.support.tile.attention_case import arguments, attention, keep, matrix, near
from tests.support.tile.flash_fp8_case import attention8
from tests.support.tile.ragged_case import ragged
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.attention import flash
from tinygrad_nv.cpu.target import CPU
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
