"""The wgmma template of attention's backward pass on the emulator: scores, extents of a launch, generated
cases."""
from __future__ import annotations

import math

import pytest
import torch
from attention_case import attended, matrix
from backward_case import arguments, backward, given_forward, lies, near, run
from flash_backward_wgmma_case import BF16, CAUSAL, F16, F32, HALVED, LOW, SMALL, WIDE, close
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.schedules import BackwardWgmma
from tinygrad_nv.tile.attention.spec import FULL, SYMBOLS, Band
from tinygrad_nv.tile.expression import Constant, Expression, Load, Position, Sum, tanh, where
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

# **** scores: of 70 rows and 100 keys, two key heads of two query heads each ****

SCALED = Sum() * 0.125
ROW, COLUMN = (Position(axis).cast(F32) for axis in "mn")
MASK = Load(0, dtypes.bool, 100, 1)
SCORES: dict[str, Expression] = {
    "sum": Sum(), "twice": Sum() * 0.5 * 0.25, "negative": Sum() * -0.125, "constant": Sum() * 0.0,
    "mask": where(MASK, SCALED, Constant(-math.inf)),
    "mask of a head": where(Load(0, dtypes.bool, 100, 1, (28000, 14000, 7000)), SCALED, Constant(-math.inf)),
    "mask of keys": where(Load(0, dtypes.bool, 0, 1), SCALED, Constant(-math.inf)),
    "bias": SCALED + Load(0, F32, 101, 1, (0, 7070, 0), 3),
    "bias of a head": SCALED + Load(0, BF16, 100, 1, (0, 14000, 7000)).cast(F32),
    "bias of rows": SCALED + Load(0, F16, 1, 0).cast(F32),
    "soft-cap": tanh(SCALED * 0.05) * 20.0, "steep soft-cap": tanh(SCALED * 30.0) * 2.0,
    "soft-cap and mask": where(MASK, tanh(SCALED) * 2.0, Constant(-math.inf)),
    "alibi": SCALED + (COLUMN - ROW) * (Position(1).cast(F32) + 1.0) * 0.03125,
    "a temperature for each row": SCALED * Load(0, F32, 1, 0).reciprocal(), "squared": Sum() * Sum() * 0.02}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str):
    """Rows and keys end within blocks; the band too, and rows may see nothing by a mask."""
    for band in (FULL, Band(-60, 30)):
        close(backward(70, 100, 32, heads=2, group=2, band=band, score=SCORES[name]), seed=len(name) % 4)


@pytest.mark.parametrize("name", ["bias of a head", "soft-cap", "mask"])
@pytest.mark.parametrize("schedule", [WIDE, SMALL, HALVED], ids=str)
def test_scores_in_other_blocks(schedule: BackwardWgmma, name: str):
    close(backward(70, 100, 64, heads=2, group=2, band=CAUSAL, start=20, score=SCORES[name]), schedule)


def test_rows_that_are_masked_throughout_have_no_share():
    spec = backward(70, 100, 64, score=SCORES["mask"])
    given = arguments(spec)
    mask = given["x0"].view(70, 100)
    mask[5] = mask[40:64] = False
    given_forward(spec, given)
    assert (lies(spec, given, "l") == -torch.inf).sum() == 25
    got = run(TABLE.build(spec, LOW, GPU("sm_90a")), spec, given, "sm_90a")
    near(spec, given, got)
    assert (got.dq[..., 40:64, :] == 0).all()


def test_large_scores():
    """Weights are as good as 0 and 1; nothing overflows."""
    close(backward(70, 50, 64, score=Sum() * 8.0), scale=8.0)
    close(backward(70, 50, 64, score=tanh(Sum() * 4.0) * 300.0), scale=8.0)


@pytest.mark.parametrize("score", [Sum() * 0.1, Sum() * -0.1], ids=["folded", "evaluated"])
def test_scores_near_the_largest_float(score: Expression):
    """Sums of 2^125, whose roundings are beyond all exponents: no gradient is infinite."""
    spec = backward(64, 128, 64, score=score)
    given = arguments(spec)
    for name in ("q", "k"): given[name].copy_(given[name].sign() * 2.0**60)
    given_forward(spec, given)
    got = run(TABLE.build(spec, LOW, GPU("sm_90a")), spec, given, "sm_90a")
    for each in got: assert each.isfinite().all()
    near(spec, given, got)


def test_finite_differences():
    """The loss Σ out · grad of the exact forward, changed along the gradient of each operand in turn."""
    spec = backward(40, 50, 16, F16, group=2, band=Band(None, 20), score=SCORES["soft-cap"], out=F32)
    given = arguments(spec)
    got = run(TABLE.build(spec, LOW, GPU("sm_90a")), spec, given, "sm_90a")

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


# **** extents of a launch ****

@pytest.mark.parametrize("s_kv", [1, 128, 129])
@pytest.mark.parametrize("s_q", [1, 127, 140])
def test_extents_of_a_launch(s_q: int, s_kv: int):
    spec = backward(140, 150, 32, band=CAUSAL, start=60, group=2, order="brh", symbolic=SYMBOLS)
    close(spec, seed=s_kv % 4, s_q=s_q, s_kv=s_kv, start=max(0, min(60, s_kv - s_q)))


@pytest.mark.parametrize("symbolic", [("s_q",), ("s_kv",), ("start",), ("s_q", "start")], ids="+".join)
def test_some_symbolic_extents(symbolic: tuple[str, ...]):
    spec = backward(140, 150, 40, band=Band(-100, 0), start=20, symbolic=symbolic, out=F32,
                    score=Sum() * 0.1 + Load(0, F32, 150, 1))
    counts = {"s_q": 130, "s_kv": 131, "start": 1}
    close(spec, **{name: counts[name] for name in symbolic})


def test_a_launch_has_the_blocks_of_its_keys():
    spec = backward(64, 300, 64, heads=3, group=2, batch=5, symbolic=("s_kv",))
    made = TABLE.build(spec, LOW, GPU("sm_90a"))
    assert made.grid == (3, 3, 5)
    assert [made.grid_for(s_kv) for s_kv in (1, 128, 129)] == [(1, 3, 5), (1, 3, 5), (2, 3, 5)]


# **** generated ****

EDGE = st.one_of(st.none(), st.integers(-150, 60))
HEADS = st.one_of(st.sampled_from([32, 64, 96, 128, 192, 256]), st.integers(1, 16).map(lambda n: 8 * n))
LENGTHS = st.one_of(st.integers(1, 200), st.sampled_from([64, 128, 192]))


@st.composite
def specs(draw: st.DrawFn) -> tuple[BackwardSpec, dict[str, int]]:
    """A backward pass, and the extents of a launch that its symbolic ones have."""
    s_q, s_kv, d = draw(LENGTHS), draw(LENGTHS), draw(HEADS)
    batch, heads, group = (draw(st.integers(1, most)) for most in (1, 2, 2))
    band = draw(st.sampled_from([FULL, CAUSAL, Band(draw(EDGE), draw(EDGE))]))
    start = draw(st.one_of(st.just(0), st.integers(0, 100)))
    symbolic = tuple(name for name in SYMBOLS if draw(st.integers(0, 3)) == 0)
    score: Expression = Sum() * draw(st.sampled_from([0.1, 1.0, 0.25, -0.2]))
    if draw(st.integers(0, 3)) == 0: score = score + Load(0, F32, s_kv + 1, 1, (0, 0, s_q * (s_kv + 1)))
    if draw(st.integers(0, 3)) == 0: score = tanh(score * 0.5) * 2.0
    d_v, out = draw(st.sampled_from([d, d, 64, 40])), draw(st.sampled_from([None, F32, F16]))
    spec = backward(s_q, s_kv, d, draw(st.sampled_from([BF16, F16])), batch, heads, group, band, score, start,
                    d_v, out, draw(st.sampled_from(["bhr", "brh"])), draw(st.sampled_from([0, 8])), symbolic,
                    draw(st.booleans()))
    most = {"s_q": (1, s_q), "s_kv": (1, s_kv), "start": (0, start)}
    return spec, {name: draw(st.integers(*most[name])) for name in symbolic}


@settings(max_examples=8, deadline=None)
@given(specs(), st.sampled_from([WIDE, LOW, SMALL, HALVED]), st.integers(2, 3), st.integers(0, 3))
def test_generated(case: tuple[BackwardSpec, dict[str, int]], schedule: BackwardWgmma, stages: int,
                   seed: int):
    spec, extents = case
    choices = schedule.stages(stages), LOW, SMALL, HALVED
    possible = [one for one in choices if not TABLE.problems(spec, one, GPU("sm_90a"))]
    if possible: close(spec, possible[0], seed, **extents)
