"""Backward passes of scores that are more than multiples of sums: masks, biases, soft-caps, positions."""
from __future__ import annotations

import math

import pytest
import torch
from attention_case import attended, matrix
from backward_case import arguments, backward, given_forward, lies, near, reference, run
from flash_backward_mma_case import BF16, CAUSAL, F16, F32, SMALL, close
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.spec import FULL, Band
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.expression import Constant, Expression, Load, Position, Sum, tanh, where
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

SCALED = Sum() * 0.1
ROW, COLUMN = (Position(axis).cast(F32) for axis in "mn")
SCORES: dict[str, Expression] = {
    "mask": where(Load(0, dtypes.bool, 50, 1), SCALED, Constant(-math.inf)),
    "mask of a head": where(Load(0, dtypes.bool, 50, 1, (14000, 7000, 3500)), SCALED, Constant(-math.inf)),
    "bias": SCALED + Load(0, F32, 50, 1), "bias of keys": SCALED + Load(0, BF16, 0, 1).cast(F32),
    "soft-cap": tanh(SCALED * 0.02) * 50.0, "steep soft-cap": tanh(SCALED * 30.0) * 2.0,
    "soft-cap and mask": where(Load(0, dtypes.bool, 50, 1), tanh(SCALED) * 2.0, Constant(-math.inf)),
    "ALiBi": SCALED + Load(0, F32, 0, 0, (0, 2, 1)) * (COLUMN - ROW),
    "a temperature for each row": SCALED * Load(0, F32, 1, 0).reciprocal(),
    "positive": SCALED.maximum(0.05), "squared": Sum() * Sum() * 0.02, "constant": Sum() * 0.0,
    "negative": Sum() * -0.2, "in f16": ((Sum() * 0.1).cast(F16) * Load(0, F16, 0, 1)).cast(F32)}


@pytest.mark.parametrize("band", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, band: Band):
    """Two key heads with two query heads each; rows and keys end within blocks. Rows may see nothing."""
    close(backward(70, 50, 16, batch=2, heads=2, group=2, band=band, score=SCORES[name]))


@pytest.mark.parametrize("name", ["bias", "soft-cap and mask"])
def test_scores_by_default_schedules(name: str):
    spec = backward(70, 50, 64, F16, band=CAUSAL, score=SCORES[name])
    for arch in ("sm_80", "sm_90a"):
        schedule = ATTENTION.choose(spec, GPU(arch))
        assert schedule is not None
        if schedule.template == "flash_backward_mma": close(spec, schedule, arch, seed=1)


def test_large_scores():
    """Weights are as good as 0 and 1; nothing overflows."""
    close(backward(70, 50, 16, score=Sum() * 8.0), scale=8.0)
    close(backward(70, 50, 16, score=tanh(Sum() * 4.0) * 300.0), scale=8.0)


@pytest.mark.parametrize("size", [2.0**14, 2.0**60])
@pytest.mark.parametrize("score", [Sum() * 0.1, Sum() * -0.1], ids=["folded", "evaluated"])
def test_scores_beyond_all_exponents(score: Expression, size: float):
    """Sums of 2^34 and 2^126, whose roundings are many powers of two: no gradient is of their size."""
    spec = backward(64, 128, 64, score=score)
    given = arguments(spec)
    for name in ("q", "k"): given[name].copy_(given[name].sign() * size)
    given_forward(spec, given)
    near(spec, given, run(TABLE.build(spec, SMALL, GPU("sm_80")), spec, given))


def test_rows_that_see_nothing_have_no_share():
    """By a mask in memory: their l is −inf, whatever grad they have."""
    spec = backward(70, 50, 16, score=SCORES["mask"])
    given = arguments(spec)
    mask = given["x0"].view(70, 50)
    mask[5] = mask[40:64] = False
    given_forward(spec, given)
    assert (lies(spec, given, "l") == -torch.inf).sum() == 25
    got = run(TABLE.build(spec, SMALL, GPU("sm_80")), spec, given)
    near(spec, given, got)
    assert (got.dq[..., 40:64, :] == 0).all()


def test_keys_that_no_row_sees_are_not_read():
    """Beyond a causal band they are NaN; their gradients are 0."""
    spec = backward(40, 130, 16, band=CAUSAL, start=20)
    given = arguments(spec)
    spoilt = {name: storage.clone() for name, storage in given.items()}
    for name in "kv": matrix(spec.forward, spoilt, name)[..., 60:, :] = torch.nan
    got = run(TABLE.build(spec, SMALL, GPU("sm_80")), spec, spoilt)
    near(spec, given, got)
    assert (got.dk[..., 60:, :] == 0).all()
    assert (got.dv[..., 60:, :] == 0).all()


def test_finite_differences():
    """The loss Σ out · grad of the exact forward, changed along the gradient of each operand in turn."""
    spec = backward(40, 50, 16, F16, heads=1, group=2, band=Band(None, 20), score=SCORES["soft-cap"], out=F32)
    given = arguments(spec)
    got = run(TABLE.build(spec, SMALL, GPU("sm_80")), spec, given)

    def loss(name: str, step: float, along: torch.Tensor) -> float:
        moved = {one: given[one].double() for one in (*"qkv", "grad")}
        there = matrix(spec.forward, moved, name)[:, :, :along.shape[2]]
        there += step * along
        out, _ = attended(spec.forward, given | moved, torch.float64)
        return float((out * lies(spec, moved, "grad")).sum())

    for name, gradient in zip("qkv", got, strict=True):
        along = gradient if name == "q" else gradient.unsqueeze(2)[:, :, :1]
        slope = (loss(name, 0.02, along) - loss(name, -0.02, along)) / 0.04
        assert abs(slope - float((gradient ** 2).sum())) < 2e-3 * abs(slope)


def test_the_formulas_agree_where_nothing_is_random():
    """One key: p is 1, so that dv is the sum of grad, and dq and dk are 0."""
    spec = backward(40, 1, 16, F16, out=F32)
    given = arguments(spec)
    lies(spec, given, "grad").copy_(torch.arange(-320, 320).view(1, 1, 1, 40, 16) / 64)
    given_forward(spec, given)
    got = run(TABLE.build(spec, SMALL, GPU("sm_80")), spec, given)
    assert torch.equal(got.dv, reference(spec, given).dv.float().double())
    near(spec, given, got)
