"""The wgmma template of attention's backward pass on the emulator: extents of a launch, generated cases."""
from __future__ import annotations

import pytest
from backward_case import backward
from flash_backward_wgmma_case import BF16, CAUSAL, F16, F32, HALVED, LOW, SMALL, WIDE, close
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.schedules import BackwardWgmma
from tinygrad_nv.tile.attention.spec import FULL, SYMBOLS, Band
from tinygrad_nv.tile.expression import Expression, Load, Sum, tanh
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

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
