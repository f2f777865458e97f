"""Generated attentions through the mma.sync template: any heads, extents, bands, scores, layouts."""
from __future__ import annotations

import math

from attention_case import arguments, attention, near, run
from flash_mma_case import BF16, F16, F32, scheduled
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.schedules import FlashMma
from tinygrad_nv.tile.attention.spec import SYMBOLS, AttentionSpec, Band
from tinygrad_nv.tile.expression import Constant, Expression, Load, Position, Sum, tanh, where
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

EDGE = st.one_of(st.none(), st.integers(-150, 60))
HEADS = st.one_of(st.sampled_from([32, 64, 96, 128, 192, 256]), st.integers(1, 20).map(lambda n: 8 * n))
ROWS = st.one_of(st.integers(1, 140), st.sampled_from([16, 32, 64, 128]))
KEYS = st.one_of(st.integers(1, 260), st.sampled_from([32, 64, 128, 256]))


@st.composite
def scores(draw: st.DrawFn, s_q: int, s_kv: int, heads: int, group: int) -> Expression:
    """Scales, most often; masks and biases with strides that are 0 here and there."""
    score: Expression = Sum() * draw(st.sampled_from([0.1, 1.0, 0.25, -0.2]))
    if draw(st.booleans()): return score
    if draw(st.booleans()): score = tanh(score * 0.5) * 2.0
    parameter = 0

    def load(dtype: object) -> Load:
        nonlocal parameter
        pitch = s_kv + draw(st.sampled_from([0, 0, 1, 8]))
        strides = (heads * group * s_q * pitch, group * s_q * pitch, s_q * pitch)
        batch = tuple(stride if draw(st.booleans()) else 0 for stride in strides)
        parameter += 1
        return Load(parameter - 1, dtype, draw(st.sampled_from([0, pitch, pitch])),  # type: ignore[arg-type]
                    draw(st.sampled_from([0, 1, 1])), batch, draw(st.integers(0, 3)))

    if draw(st.booleans()): score = score + load(draw(st.sampled_from([F32, F16, BF16]))).cast(F32)
    if draw(st.booleans()): score = score + Position("n").cast(F32) * -0.01 + Position(1).cast(F32)
    if draw(st.booleans()): score = where(load(dtypes.bool), score, Constant(-math.inf))
    return score


@st.composite
def specs(draw: st.DrawFn) -> tuple[AttentionSpec, dict[str, int]]:
    """An attention, and the extents of a launch that its symbolic ones have."""
    s_q, s_kv, d = draw(ROWS), draw(KEYS), draw(HEADS)
    batch, heads, group = (draw(st.integers(1, most)) for most in (2, 2, 3))
    band = draw(st.sampled_from([Band(), Band(None, 0), Band(draw(EDGE), draw(EDGE))]))
    start = draw(st.one_of(st.just(0), st.integers(0, 150)))
    symbolic = tuple(name for name in SYMBOLS if draw(st.integers(0, 3)) == 0)
    spec = attention(s_q, s_kv, d, draw(st.sampled_from([BF16, F16])), batch, heads, group, band,
                     draw(scores(s_q, s_kv, heads, group)), start, draw(st.sampled_from([d, d, 64, 40])),
                     draw(st.sampled_from([None, F32, F16])), draw(st.sampled_from(["bhr", "brh"])),
                     draw(st.sampled_from([0, 0, 2, 4, 8])), symbolic, draw(st.booleans()))
    most = {"s_q": (1, s_q), "s_kv": (1, s_kv), "start": (0, start)}
    return spec, {name: draw(st.integers(*most[name])) for name in symbolic}


@st.composite
def schedules(draw: st.DrawFn) -> FlashMma:
    """Up to 32 rows of a warp."""
    warps, tiles = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2))
    return FlashMma().block(16 * warps * tiles, draw(st.sampled_from([16, 32, 64]))) \
        .warps(warps).stages(draw(st.integers(2, 4)))


@settings(max_examples=60, deadline=None)
@given(specs(), schedules(), st.sampled_from(["sm_80", "sm_89", "sm_90a"]), st.integers(0, 3))
def test_generated(case: tuple[AttentionSpec, dict[str, int]], schedule: FlashMma, arch: str, seed: int):
    spec, extents = case
    if TABLE.problems(spec, schedule, GPU(arch)): schedule = scheduled(32, 16, 2)
    memory = arguments(spec, seed)
    made = TABLE.build(spec, schedule, GPU(arch))
    near(spec, memory, run(made, spec, memory, arch, seed, **extents), **extents)
