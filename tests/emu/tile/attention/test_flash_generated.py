"""Generated attentions through every template: any heads, extents, bands, scores, layouts, schedules."""
from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import DType, dtypes

from tests.support.tile.attention_case import attention
from tests.support.tile.flash_case import BF16, F16, F32, FlashSchedule, W, close, fma, mma
from tinygrad_nv.tile.attention.spec import SYMBOLS, AttentionSpec, Band
from tinygrad_nv.tile.expression import Constant, Expression, Load, Position, Sum, tanh, where
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

EDGE = st.one_of(st.none(), st.integers(-150, 60))
ROWS = st.one_of(st.integers(1, 140), st.sampled_from([16, 32, 64, 128]))
KEYS = st.one_of(st.integers(1, 260), st.sampled_from([32, 64, 128, 256]))
WIDE = st.sampled_from([32, 64, 96, 128, 192, 256])
HALF = st.one_of(WIDE, st.integers(1, 20).map(lambda n: 8 * n))
# rows, keys, heads, dtypes, results, gaps after rows
SIDES: dict[str, tuple[Any, ...]] = {
    "mma": (ROWS, KEYS, HALF, [BF16, F16], [None, F32, F16], [0, 0, 2, 4, 8]),
    "wgmma": (st.one_of(st.integers(1, 200), st.sampled_from([64, 128, 192])),
              st.one_of(st.integers(1, 400), st.sampled_from([64, 128, 256])), HALF, [BF16, F16],
              [None, F32, F16], [0, 8]),
    "fma": (ROWS, KEYS, st.one_of(WIDE, st.integers(1, 90)), [F32], [F32, F32, BF16], [0, 0, 1, 2, 4])}
EXAMPLES = {"mma": 30, "wgmma": 14, "fma": 10}
LEGAL: dict[str, FlashSchedule] = {"mma": mma(32, 16, 2), "wgmma": W.block(64, 32).warps(8),
                                   "fma": fma(32, 16, 2)}


@st.composite
def scores(draw: st.DrawFn, s_q: int, s_kv: int, heads: int, group: int) -> Expression:
    """Scales, most often; masks and biases with strides that are 0 here and there."""
    score: Expression = Sum() * draw(st.sampled_from([0.1, 1.0, 0.25, -0.2]))
    if draw(st.booleans()): return score
    if draw(st.booleans()): score = tanh(score * 0.5) * 2.0
    parameter = 0

    def load(dtype: DType) -> Load:
        nonlocal parameter
        pitch = s_kv + draw(st.sampled_from([0, 0, 1, 8]))
        strides = (heads * group * s_q * pitch, group * s_q * pitch, s_q * pitch)
        batch = tuple(stride if draw(st.booleans()) else 0 for stride in strides)
        parameter += 1
        return Load(parameter - 1, dtype, draw(st.sampled_from([0, pitch, pitch])),
                    draw(st.sampled_from([0, 1, 1])), batch, draw(st.integers(0, 3)))

    if draw(st.booleans()): score = score + load(draw(st.sampled_from([F32, F16, BF16]))).cast(F32)
    if draw(st.booleans()): score = score + Position("n").cast(F32) * -0.01 + Position(1).cast(F32)
    if draw(st.booleans()): score = where(load(dtypes.bool), score, Constant(-math.inf))
    return score


@st.composite
def specs(draw: st.DrawFn, template: str) -> tuple[AttentionSpec, dict[str, int]]:
    """An attention, and the extents of a launch that its symbolic ones have."""
    rows, keys, widths, operands, results, gaps = SIDES[template]
    s_q, s_kv, d = draw(rows), draw(keys), draw(widths)
    batch, heads, group = (draw(st.integers(1, most)) for most in (2, 2, 3))
    band = draw(st.sampled_from([Band(), Band(None, 0), Band(draw(EDGE), draw(EDGE))]))
    start = draw(st.one_of(st.just(0), st.integers(0, 150)))
    symbolic = tuple(name for name in SYMBOLS if draw(st.integers(0, 3)) == 0)
    spec = attention(s_q, s_kv, d, draw(st.sampled_from(operands)), batch, heads, group, band,
                     draw(scores(s_q, s_kv, heads, group)), start,
                     draw(st.sampled_from([d, d, 64, 37 if template == "fma" else 40])),
                     draw(st.sampled_from(results)), draw(st.sampled_from(["bhr", "brh"])),
                     draw(st.sampled_from(gaps)), symbolic, draw(st.booleans()))
    most = {"s_q": (1, s_q), "s_kv": (1, s_kv), "start": (0, start)}
    return spec, {name: draw(st.integers(*most[name])) for name in symbolic}


@st.composite
def schedules(draw: st.DrawFn, template: str) -> FlashSchedule:
    def pick(*choices: Any) -> Any: return draw(st.sampled_from(choices))

    stages = draw(st.integers(2, 4))
    if template == "mma":  # up to 32 rows of a warp
        warps = pick(1, 2, 4)
        return mma(16 * warps * draw(st.integers(1, 2)), pick(16, 32, 64), warps, stages)
    if template == "fma":  # up to 64
        along_m, along_n = pick((1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2))
        return fma(pick(16, 32, 64) * along_m, pick(8, 16, 32) * along_n, along_m, along_n, stages)
    consumers = draw(st.integers(1, 3))
    made = W.block(64 * consumers, 16 * draw(st.integers(1, 8))).warps(4 * consumers + 4).stages(stages)
    return made.pingpong() if consumers > 1 and draw(st.booleans()) else made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("template", SIDES)
def test_generated(template: str):
    @settings(max_examples=EXAMPLES[template], deadline=None)
    @given(specs(template), schedules(template), st.sampled_from(["sm_80", "sm_89", "sm_90a"]),
           st.integers(0, 3))
    def drawn(case: tuple[AttentionSpec, dict[str, int]], schedule: FlashSchedule, arch: str,
              seed: int) -> None:
        spec, extents = case
        if template == "wgmma": arch = "sm_90a"
        if TABLE.problems(spec, schedule, GPU(arch)): schedule = LEGAL[template]
        close(spec, schedule, arch, seed, **extents)

    drawn()
