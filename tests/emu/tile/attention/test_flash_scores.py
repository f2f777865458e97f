"""Scores of every kind through the templates of attention, from the smallest to the largest; and what one
template alone has."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tinygrad.dtype import dtypes

from tests.support.tile.attention_case import arguments, attention, matrix, near, reference
from tests.support.tile.flash_case import (
    BF16,
    CAUSAL,
    F16,
    F32,
    FMA,
    MMA,
    SHARED,
    WGMMA,
    FlashSchedule,
    W,
    built,
    close,
    launch,
    mma,
)
from tinygrad_nv.tile.attention.schedules import FlashWgmma
from tinygrad_nv.tile.attention.spec import FULL, Band
from tinygrad_nv.tile.expression import Constant, Expression, Load, Position, Sum, tanh, where

NOTHING, SCALED = Constant(-math.inf), Sum() * 0.125
HALF_PRECISION = pytest.mark.parametrize("schedule", [MMA, WGMMA], ids=["mma", "wgmma"])
COLUMN, ROW = Position("n").cast(F32), Position("m").cast(F32)
SCORES: dict[str, Expression] = {
    "the sum": Sum(), "negative": SCALED * -1.0, "nothing": Sum() * 0.0, "twice scaled": 0.5 * SCALED,
    "hardly": Sum() * 1e-36,
    "soft-cap": tanh(SCALED * 0.2) * 5.0, "soft-cap of 20": tanh(SCALED * 0.05) * 20.0,
    "bias": SCALED + Load(0, F32, 201, 1, (4 * 140 * 201, 2 * 140 * 201, 140 * 201), 3),
    "bias of columns": SCALED + Load(0, BF16, 0, 1, (0, 200, 0), 3).cast(F32),
    "bias of rows": SCALED + Load(0, F16, 1, 0, (0, 140, 0)).cast(F32),
    "aligned pairs": SCALED + Load(0, F16, 256, 1).cast(F32),
    "mask": where(Load(0, dtypes.bool, 200, 1), SCALED, NOTHING),
    "mask of columns": where(Load(0, dtypes.bool, 0, 1), SCALED, NOTHING),
    "ALiBi": SCALED + (COLUMN - ROW) * 0.0625,
    "ALiBi by head": SCALED + Load(0, F32, 0, 0, (0, 2, 1)) * (COLUMN - ROW),
    "by head": SCALED * (1.0 + Position(1).cast(F32)) + Position(2).cast(F32) * COLUMN * .01
               + Position(0).cast(F32),
    "prefix": where(Position("n") < Constant(50, dtypes.int32), SCALED, NOTHING),
    "two parameters": where(Load(1, dtypes.bool, 0, 1), SCALED + Load(0, F32, 200, 1), NOTHING)}


@pytest.mark.sampled(1)
@HALF_PRECISION
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, schedule: FlashSchedule):
    """Several blocks of columns, the last one partial; half of a mask holds."""
    rows, schedule = (140, schedule) if schedule is WGMMA else (40, mma(32, 32, 1))
    for band, s_kv, seed in ((FULL, 199, 0), (CAUSAL, 198, 1), (CAUSAL, 200, 2)):
        close(attention(rows, s_kv, 64, score=SCORES[name], batch=2, heads=2, group=2, band=band, start=100,
                        lse=True), schedule, seed=seed)


def test_a_multiple_of_the_sum_is_not_evaluated():
    """A scale belongs to the exponent: as many instructions as without one."""
    def lines(score: Expression) -> int:
        return built(attention(64, 128, 64, score=score), MMA).ptx.count("\n")
    assert lines(Sum()) == lines(Sum() * 0.1) == lines(2.0 * (Sum() * 0.1)) < lines(Sum() * -0.1)


@HALF_PRECISION
def test_rows_masked_in_memory_are_zeros(schedule: FlashSchedule):
    spec = attention(140, 200, 64, score=where(Load(0, dtypes.bool, 200, 1), SCALED, NOTHING), lse=True)
    given = arguments(spec)
    mask = given["x0"].view(140, 200)
    mask[[3, 20, 100]] = False
    mask[21, :199] = False
    out, log = launch(spec, schedule, given)
    near(spec, given, (out, log))
    assert log is not None
    sees = mask.any(-1)
    assert torch.equal((out != 0).any(-1).flatten(), sees)
    assert torch.equal(log.flatten() != -torch.inf, sees)


# **** small and large ****

@pytest.mark.parametrize("scale", [30.0, 1e4, 1e-6])
def test_very_large_and_very_small_operands(scale: float):
    """Up to 10⁹: a row is then its largest score's value, as far as float32 tells scores apart."""
    spec = attention(40, 200, 64, BF16, band=CAUSAL, start=100)
    given = arguments(spec)
    given["q"].mul_(scale)
    if scale > 100: given["k"].mul_(scale)
    out, _ = launch(spec, MMA, given)
    exact, _ = reference(spec, given)
    if scale < 1e4: near(spec, given, (out, None))
    else: assert (out - exact).abs().max() <= 2.0**-7 * exact.abs().max()


@pytest.mark.parametrize("scale", [1e-6, 30.0, 1e4, 1e15])
def test_very_large_and_very_small_operands_in_float32(scale: float):
    """Beyond 10⁹ a row is its largest score's value, as far as float32 tells scores apart."""
    spec = attention(40, 100, 32, F32, band=CAUSAL, start=60, lse=True)
    given = arguments(spec)
    given["q"].mul_(scale)
    if scale > 100: given["k"].mul_(scale)
    got = launch(spec, FMA, given)
    if scale <= 100: return near(spec, given, got)
    largest = matrix(spec, given, "q").double() @ matrix(spec, given, "k").double().transpose(-1, -2)
    size = largest.abs().amax()
    largest.masked_fill_(torch.arange(100)[None] > torch.arange(40)[:, None] + 60, -torch.inf)
    top = largest.topk(2).values
    clear = top[..., 0] - top[..., 1] > 1e-5 * size
    exact = matrix(spec, given, "v")[0, 0, 0][largest.argmax(-1)].double()
    assert clear.float().mean() > 0.5
    assert torch.equal(got[0][clear], exact[clear])
    return None


@pytest.mark.parametrize("scale", [1e-4, 30.0, 1000.0])
def test_small_and_large_scores(scale: float):
    close(attention(100, 330, 64, score=Sum() * scale, lse=True), WGMMA)


@pytest.mark.parametrize("score", [Sum() * 0.125, Sum() * -0.125], ids=["folded", "evaluated"])
def test_scores_near_the_largest_float(score: Expression):
    """Sums of 2^125: nothing overflows on the way to the exponent."""
    spec = attention(64, 128, 64, score=score, lse=True)
    given = arguments(spec)
    for name in ("q", "k"): given[name].copy_(given[name].sign() * 2.0**60)
    got = launch(spec, WGMMA, given)
    near(spec, given, got)
    assert got[0].isfinite().all()


@HALF_PRECISION
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_scores_that_rise_or_fall_from_block_to_block(order: str, schedule: FlashSchedule):
    """Blocks come from the last to the first: where scores rise on that way, what was summed before shrinks
    each time; else never."""
    spec = attention(64, 512, 64, F16, lse=True)
    for step in (0.5, 3.0, 40.0):
        given = arguments(spec)
        block = torch.arange(512) // 64
        matrix(spec, given, "q")[..., 0] = 8.0
        matrix(spec, given, "k")[..., 0] = step * (block if order == "falling" else 7 - block)
        near(spec, given, launch(spec, schedule, given))


def test_nothing_is_rounded_to_tensor_cores_formats():
    """A row whose result lies in the last bits of values that are large."""
    spec = attention(1, 2, 4, F32, score=None)
    given = arguments(spec)
    given["q"].zero_()
    matrix(spec, given, "v")[..., 0, :] = 1 + 2.0**-22
    matrix(spec, given, "v")[..., 1, :] = -1.0
    assert (launch(spec, SHARED, given)[0] == 2.0**-23).all()


# **** what wgmma alone has ****

def test_rows_of_a_result_that_tma_cannot_have():
    """Rows that begin at odd elements are stored one by one."""
    spec = attention(70, 130, 40)
    for row, offset in ((41, 0), (40, 1), (42, 2)):
        out = replace(spec.out, row=row, batch=(70 * row,) * 3, offset=offset)
        close(replace(spec, out=out), WGMMA)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", [WGMMA.pingpong(), W.block(192, 64).warps(16).pingpong()], ids=str)
def test_turns_where_ctas_have_one_block_or_none(schedule: FlashWgmma):
    close(attention(400, 64, 64, band=Band(-30, -10), start=60, lse=True), schedule)


def test_a_launch_has_the_blocks_of_its_rows():
    made = built(attention(300, 64, 64, heads=3, group=2, batch=5, symbolic=("s_q",)), WGMMA)
    assert made.grid == (3, 6, 5)
    assert [made.grid_for(s_q) for s_q in (1, 128, 129)] == [(1, 6, 5), (1, 6, 5), (2, 6, 5)]
