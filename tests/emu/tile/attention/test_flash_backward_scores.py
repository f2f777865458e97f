"""What both templates of attention's backward pass make of scores that are more than multiples of sums:
masks, biases, soft-caps, positions; and of what no row sees. A template is a `Kind`."""
from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from tinygrad.dtype import dtypes

from tests.support.tile.attention_case import attended, matrix
from tests.support.tile.backward_case import arguments, backward, given_forward, lies, near, reference
from tests.support.tile.flash_backward_case import (
    HALVED,
    LOW,
    MMA,
    SMALL,
    WIDE,
    BackwardSchedule,
    close,
    gradients,
)
from tests.support.tile.flash_case import BF16, CAUSAL, F16, F32
from tinygrad_nv.tile.attention.schedules import BackwardMma
from tinygrad_nv.tile.attention.spec import FULL, Band
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.expression import Constant, Expression, Load, Position, Sum, tanh, where
from tinygrad_nv.tile.template import GPU


@dataclass(frozen=True)
class Kind:
    """A template: a schedule, keys and heads' width of its cases, and the batch."""
    schedule: BackwardSchedule
    keys: int
    d: int
    batch: int
    bands: tuple[Band, Band]


KINDS = {"mma": Kind(MMA, 50, 16, 2, (FULL, CAUSAL)),
         "wgmma": Kind(LOW, 100, 32, 1, (FULL, Band(-60, 30)))}
EACH = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
ROW, COLUMN = (Position(axis).cast(F32) for axis in "mn")


def scores(n: int) -> dict[str, Expression]:
    """Of 70 rows and `n` keys, two key heads of two query heads each."""
    scaled, mask, each = Sum() * 0.1, Load(0, dtypes.bool, n, 1), (280 * n, 140 * n, 70 * n)
    hidden, bias = Constant(-math.inf), Load(0, F32, n, 1)
    return {
        "sum": Sum(), "twice": Sum() * 0.5 * 0.25, "negative": Sum() * -0.2, "constant": Sum() * 0.0,
        "mask": where(mask, scaled, hidden),
        "mask of keys": where(Load(0, dtypes.bool, 0, 1), scaled, hidden),
        "mask of a head": where(Load(0, dtypes.bool, n, 1, each), scaled, hidden),
        "bias": scaled + bias, "bias of keys": scaled + Load(0, BF16, 0, 1).cast(F32),
        "bias of wide rows": scaled + Load(0, F32, n + 1, 1, (0, 70 * n + 70, 0), 3),
        "bias of a head": scaled + Load(0, BF16, n, 1, (0, 140 * n, 70 * n)).cast(F32),
        "bias of rows": scaled + Load(0, F16, 1, 0).cast(F32),
        "soft-cap": tanh(scaled * 0.02) * 50.0, "low soft-cap": tanh(scaled * 0.05) * 20.0,
        "steep soft-cap": tanh(scaled * 30.0) * 2.0,
        "soft-cap and mask": where(mask, tanh(scaled) * 2.0, hidden),
        "ALiBi": scaled + Load(0, F32, 0, 0, (0, 2, 1)) * (COLUMN - ROW),
        "ALiBi of positions": scaled + (COLUMN - ROW) * (Position(1).cast(F32) + 1.0) * 0.03125,
        "a temperature for each row": scaled * Load(0, F32, 1, 0).reciprocal(),
        "positive": scaled.maximum(0.05), "squared": Sum() * Sum() * 0.02,
        "in f16": ((Sum() * 0.1).cast(F16) * Load(0, F16, 0, 1)).cast(F32)}


@pytest.mark.sampled(2)
@EACH
@pytest.mark.parametrize("name", scores(1))
def test_scores(kind: Kind, name: str):
    """Rows and keys end within blocks; the band too, and rows may see nothing."""
    for band in kind.bands:
        spec = backward(70, kind.keys, kind.d, batch=kind.batch, heads=2, group=2, band=band,
                        score=scores(kind.keys)[name])
        close(spec, kind.schedule, seed=len(name) % 4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["bias of a head", "low soft-cap", "mask"])
@pytest.mark.parametrize("schedule", [WIDE, SMALL, HALVED], ids=str)
def test_scores_in_other_blocks(schedule: BackwardSchedule, name: str):
    spec = backward(70, 100, 64, heads=2, group=2, band=CAUSAL, start=20, score=scores(100)[name])
    close(spec, schedule)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["bias", "soft-cap and mask"])
def test_scores_by_default_schedules(name: str):
    spec = backward(70, 50, 64, F16, band=CAUSAL, score=scores(50)[name])
    for arch in ("sm_80", "sm_90a"):
        schedule = ATTENTION.choose(spec, GPU(arch))
        assert schedule is not None
        if isinstance(schedule, BackwardMma): close(spec, schedule, arch, seed=1)


@pytest.mark.sampled(1)
@EACH
def test_large_scores(kind: Kind):
    """Weights are as good as 0 and 1; nothing overflows."""
    for score in (Sum() * 8.0, tanh(Sum() * 4.0) * 300.0):
        spec = backward(70, 50, 64 if kind.schedule == LOW else 16, score=score)
        close(spec, kind.schedule, scale=8.0)


@pytest.mark.sampled(4)
@EACH
@pytest.mark.parametrize("size", [2.0**14, 2.0**60])
@pytest.mark.parametrize("score", [Sum() * 0.1, Sum() * -0.1], ids=["folded", "evaluated"])
def test_scores_beyond_all_exponents(kind: Kind, score: Expression, size: float):
    """Sums of 2^34 and 2^126, whose roundings are many powers of two: no gradient is of their size, or
    infinite."""
    spec = backward(64, 128, 64, score=score)
    given = arguments(spec)
    for name in ("q", "k"): given[name].copy_(given[name].sign() * size)
    given_forward(spec, given)
    got = gradients(spec, kind.schedule, given)
    for each in got: assert each.isfinite().all()
    near(spec, given, got)


@EACH
def test_the_slope_of_a_hidden_score_may_be_infinite(kind: Kind):
    """Scores of -exp2(40 · sum) are -inf from sums of 4 on; that of the first key is -1."""
    score = Constant(0.0) - (Sum() * 40.0).exp2()
    spec = backward(70, kind.keys, 64 if kind.schedule == LOW else 16, score=score)
    given = arguments(spec)
    lies(spec, given, "k")[..., 0, :] = 0
    given_forward(spec, given)
    for each in gradients(spec, kind.schedule, given): assert each.isfinite().all()


@EACH
def test_rows_that_see_nothing_have_no_share(kind: Kind):
    """By a mask in memory: their l is −inf, whatever grad they have."""
    d = 64 if kind.schedule == LOW else 16
    spec = backward(70, kind.keys, d, score=scores(kind.keys)["mask"])
    given = arguments(spec)
    mask = given["x0"].view(70, kind.keys)
    mask[5] = mask[40:64] = False
    given_forward(spec, given)
    assert (lies(spec, given, "l") == -torch.inf).sum() == 25
    got = gradients(spec, kind.schedule, given)
    near(spec, given, got)
    assert (got.dq[..., 40:64, :] == 0).all()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("kind", "band"), [
    (KINDS["mma"], CAUSAL), (KINDS["wgmma"], CAUSAL), (KINDS["wgmma"], Band(160, None))],
    ids=["mma", "wgmma", "wgmma-before"])
def test_keys_that_no_row_sees_do_not_count(kind: Kind, band: Band, seed: int):
    """They and their values are NaN, within a block of others too; their gradients are 0."""
    spec = backward(70, 300, 64, band=band, start=40)
    given = arguments(spec, seed)
    spoilt = {name: storage.clone() for name, storage in given.items()}
    beyond = slice(110, None) if band == CAUSAL else slice(200)
    for name in "kv": matrix(spec.forward, spoilt, name)[..., beyond, :] = torch.nan
    got = gradients(spec, kind.schedule, spoilt, seed=seed)
    near(spec, given, got)
    for each in (got.dk, got.dv): assert (each[..., beyond, :] == 0).all()


@EACH
def test_finite_differences(kind: Kind):
    """The loss Σ out · grad of the exact forward, changed along the gradient of each operand in turn."""
    spec = backward(40, 50, 16, F16, group=2, band=Band(None, 20), score=scores(50)["low soft-cap"], out=F32)
    given = arguments(spec)
    got = gradients(spec, kind.schedule, given)

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


@EACH
def test_the_formulas_agree_where_nothing_is_random(kind: Kind):
    """One key: p is 1, so that dv is the sum of grad, and dq and dk are 0."""
    spec = backward(40, 1, 16, F16, out=F32)
    given = arguments(spec)
    lies(spec, given, "grad").copy_(torch.arange(-320, 320).view(1, 1, 1, 40, 16) / 64)
    given_forward(spec, given)
    got = gradients(spec, kind.schedule, given)
    assert torch.equal(got.dv, reference(spec, given).dv.float().double())
    near(spec, given, got)
