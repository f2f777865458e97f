"""Generated attentions in float32: any heads, extents, bands, scores, layouts, schedules."""
from __future__ import annotations

from attention_case import arguments, attention, near, run
from flash_fma_case import F32, scheduled
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flash_mma_generated import EDGE, KEYS, ROWS, scores
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.schedules import FlashFma
from tinygrad_nv.tile.attention.spec import SYMBOLS, AttentionSpec, Band
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

HEADS = st.one_of(st.sampled_from([16, 32, 64, 128]), st.integers(1, 90))


@st.composite
def specs(draw: st.DrawFn) -> tuple[AttentionSpec, dict[str, int]]:
    """An attention, and the extents of a launch that its symbolic ones have."""
    s_q, s_kv, d = draw(ROWS), draw(KEYS), draw(HEADS)
    batch, heads, group = (draw(st.integers(1, most)) for most in (2, 2, 2))
    band = draw(st.sampled_from([Band(), Band(None, 0), Band(draw(EDGE), draw(EDGE))]))
    start = draw(st.one_of(st.just(0), st.integers(0, 150)))
    symbolic = tuple(name for name in SYMBOLS if draw(st.integers(0, 3)) == 0)
    spec = attention(s_q, s_kv, d, F32, batch, heads, group, band, draw(scores(s_q, s_kv, heads, group)),
                     start, draw(st.sampled_from([d, d, 64, 37])),
                     draw(st.sampled_from([F32, F32, dtypes.bfloat16])),
                     draw(st.sampled_from(["bhr", "brh"])), draw(st.sampled_from([0, 0, 1, 2, 4])), symbolic,
                     draw(st.booleans()))
    most = {"s_q": (1, s_q), "s_kv": (1, s_kv), "start": (0, start)}
    return spec, {name: draw(st.integers(*most[name])) for name in symbolic}


@st.composite
def schedules(draw: st.DrawFn) -> FlashFma:
    """Up to 64 rows of a warp."""
    along_m, along_n = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]))
    rows, columns = draw(st.sampled_from([16, 32, 64])), draw(st.sampled_from([8, 16, 32]))
    return scheduled(rows * along_m, columns * along_n, along_m, along_n, draw(st.integers(2, 4)))


@settings(max_examples=20, deadline=None)
@given(specs(), schedules(), st.sampled_from(["sm_80", "sm_89", "sm_90a"]), st.integers(0, 3))
def test_generated(case: tuple[AttentionSpec, dict[str, int]], schedule: FlashFma, arch: str, seed: int):
    spec, extents = case
    if TABLE.problems(spec, schedule, GPU(arch)): schedule = scheduled(32, 16, 2)
    memory = arguments(spec, seed)
    made = TABLE.build(spec, schedule, GPU(arch))
    near(spec, memory, run(made, spec, memory, arch, seed, **extents), **extents)
