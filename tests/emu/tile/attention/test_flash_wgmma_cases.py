"""The wgmma template of attention on the emulator: scores, extents of a launch, generated attentions."""
from __future__ import annotations

import math

import pytest
import torch
from attention_case import arguments, attention, near, run
from flash_wgmma_case import BF16, CAUSAL, F16, F32, SMALL, W, close
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.schedules import FlashWgmma
from tinygrad_nv.tile.attention.spec import FULL, SYMBOLS, AttentionSpec, Band
from tinygrad_nv.tile.expression import Constant, Expression, Load, Position, Sum, tanh, where
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

# **** scores ****

SCALED = Sum() * 0.125
SCORES = {
    "sum": Sum(), "twice": Sum() * 0.5 * 0.25, "negative": Sum() * -0.125, "zero": Sum() * 0.0,
    "soft-cap": tanh(SCALED * 0.05) * 20.0,
    "alibi": SCALED + (Position("n").cast(F32) - Position("m").cast(F32)) * 0.0625,
    "heads": SCALED + Position(1).cast(F32) * Position("n").cast(F32) * 0.01 + Position(0).cast(F32),
    "bias": SCALED + Load(0, F32, 201, 1, (2 * 140 * 201, 140 * 201, 0), 3),
    "bias of columns": SCALED + Load(0, BF16, 0, 1, (200, 0, 0)).cast(F32),
    "bias of rows": SCALED + Load(0, F16, 1, 0, (0, 140, 0)).cast(F32),
    "mask": where(Load(0, dtypes.bool, 200, 1), SCALED, Constant(-math.inf)),
    "mask of columns": where(Load(0, dtypes.bool, 0, 1), SCALED, Constant(-math.inf))}


@pytest.mark.parametrize("band", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, band: Band):
    """Four blocks of columns, the last one partial; half of a mask holds."""
    spec = attention(140, 200, 64, heads=2, batch=2, band=band, start=50, score=SCORES[name], lse=True)
    close(spec, seed=len(name) % 4)


def test_rows_that_are_masked_throughout_are_zeros():
    score = where(Load(0, dtypes.bool, 1, 0), SCALED, Constant(-math.inf))
    spec = attention(140, 200, 64, score=score, lse=True)
    given = arguments(spec)
    out, log = run(TABLE.build(spec, SMALL, GPU("sm_90a")), spec, given, "sm_90a")
    near(spec, given, (out, log))
    assert log is not None
    sees = given["x0"] != 0
    assert 0 < sees.sum() < 140
    assert torch.equal((out != 0).any(-1).flatten(), sees)
    assert torch.equal(log.flatten() != -torch.inf, sees)


@pytest.mark.parametrize("scale", [1e-4, 30.0, 1000.0])
def test_small_and_large_scores(scale: float):
    close(attention(100, 330, 64, score=Sum() * scale, lse=True))


@pytest.mark.parametrize("score", [Sum() * 0.125, Sum() * -0.125], ids=["folded", "evaluated"])
def test_scores_near_the_largest_float(score: Expression):
    """Sums of 2^125: nothing overflows on the way to the exponent."""
    spec = attention(64, 128, 64, score=score, lse=True)
    given = arguments(spec)
    for name in ("q", "k"): given[name].copy_(given[name].sign() * 2.0**60)
    got = run(TABLE.build(spec, SMALL, GPU("sm_90a")), spec, given, "sm_90a")
    near(spec, given, got)
    assert got[0].isfinite().all()


# **** extents of a launch ****

@pytest.mark.parametrize("s_kv", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("s_q", [1, 127, 129, 200])
def test_extents_of_a_launch(s_q: int, s_kv: int):
    spec = attention(200, 300, 64, band=CAUSAL, start=120, heads=2, group=2, order="brh",
                     symbolic=SYMBOLS, lse=True)
    close(spec, seed=s_kv % 4, s_q=s_q, s_kv=s_kv, start=max(0, min(120, s_kv - s_q)))


@pytest.mark.parametrize("symbolic", [("s_q",), ("s_kv",), ("start",), ("s_q", "start")], ids="+".join)
def test_some_symbolic_extents(symbolic: tuple[str, ...]):
    spec = attention(150, 260, 40, band=Band(-100, 0), start=110, symbolic=symbolic, out=F32,
                     score=Sum() * 0.1 + Load(0, F32, 260, 1))
    counts = {"s_q": 130, "s_kv": 131, "start": 1}
    close(spec, **{name: counts[name] for name in symbolic})


def test_a_launch_has_the_blocks_of_its_rows():
    spec = attention(300, 64, 64, heads=3, group=2, batch=5, symbolic=("s_q",))
    made = TABLE.build(spec, SMALL, GPU("sm_90a"))
    assert made.grid == (3, 6, 5)
    assert [made.grid_for(s_q) for s_q in (1, 128, 129)] == [(1, 6, 5), (1, 6, 5), (2, 6, 5)]


# **** generated ****

EDGE = st.one_of(st.none(), st.integers(-200, 80))
HEADS = st.one_of(st.sampled_from([32, 64, 96, 128, 192, 256]), st.integers(1, 20).map(lambda n: 8 * n))
ROWS = st.one_of(st.integers(1, 200), st.sampled_from([64, 128, 192]))
KEYS = st.one_of(st.integers(1, 400), st.sampled_from([64, 128, 256]))


@st.composite
def specs(draw: st.DrawFn) -> tuple[AttentionSpec, dict[str, int]]:
    """An attention, and the extents of a launch that its symbolic ones have."""
    s_q, s_kv, d = draw(ROWS), draw(KEYS), draw(HEADS)
    batch, heads, group = (draw(st.integers(1, most)) for most in (2, 2, 3))
    band = draw(st.sampled_from([FULL, CAUSAL, Band(draw(EDGE), draw(EDGE))]))
    start = draw(st.one_of(st.just(0), st.integers(0, 200)))
    symbolic = tuple(name for name in SYMBOLS if draw(st.integers(0, 3)) == 0)
    score: Expression = Sum() * draw(st.sampled_from([0.1, 1.0, 0.25, -0.2]))
    if draw(st.integers(0, 3)) == 0: score = score + Load(0, F32, s_kv + 1, 1, (0, 0, s_q * (s_kv + 1)))
    d_v, out = draw(st.sampled_from([d, d, 64, 40])), draw(st.sampled_from([None, F32, F16]))
    spec = attention(s_q, s_kv, d, draw(st.sampled_from([BF16, F16])), batch, heads, group, band, score,
                     start, d_v, out, draw(st.sampled_from(["bhr", "brh"])), draw(st.sampled_from([0, 8])),
                     symbolic, draw(st.booleans()))
    most = {"s_q": (1, s_q), "s_kv": (1, s_kv), "start": (0, start)}
    return spec, {name: draw(st.integers(*most[name])) for name in symbolic}


@st.composite
def schedules(draw: st.DrawFn) -> FlashWgmma:
    consumers = draw(st.integers(1, 3))
    schedule = W.block(64 * consumers, 16 * draw(st.integers(1, 8))).warps(4 * consumers + 4)
    schedule = schedule.stages(draw(st.integers(2, 4)))
    return schedule.pingpong() if consumers > 1 and draw(st.booleans()) else schedule


@settings(max_examples=25, deadline=None)
@given(specs(), schedules(), st.integers(0, 3))
def test_generated(case: tuple[AttentionSpec, dict[str, int]], schedule: FlashWgmma, seed: int):
    spec, extents = case
    if TABLE.problems(spec, schedule, GPU("sm_90a")): schedule = W.block(64, 32).warps(8)
    close(spec, schedule, seed, **extents)
