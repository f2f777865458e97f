"""Generated attentions on the CPU: any heads, extents, bands, scores, layouts, dtypes, levels, blocks."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import dtypes

from tests.emu.tile.attention.test_flash_generated import EDGE, KEYS, ROWS, scores
from tests.support.cpu.cpu_flash_case import LEVELS, loaded, run, same, scheduled
from tests.support.tile.attention_case import arguments, attention, near
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.tile.attention.spec import SYMBOLS, AttentionSpec, Band

HEADS = st.one_of(st.sampled_from([16, 32, 64, 128]), st.integers(1, 90))
Case = tuple[AttentionSpec, dict[str, int]]


@st.composite
def specs(draw: st.DrawFn) -> Case:
    """An attention, and the extents of a launch that its symbolic ones have."""
    s_q, s_kv, d = draw(ROWS), draw(KEYS), draw(HEADS)
    dtype = draw(st.sampled_from([dtypes.float32, dtypes.bfloat16, dtypes.float16]))
    batch, heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 5))
    band = draw(st.sampled_from([Band(), Band(None, 0), Band(draw(EDGE), draw(EDGE))]))
    start = draw(st.one_of(st.just(0), st.integers(0, 150)))
    symbolic = tuple(name for name in SYMBOLS if draw(st.integers(0, 3)) == 0)
    spec = attention(s_q, s_kv, d, dtype, batch, heads, group, band, draw(scores(s_q, s_kv, heads, group)),
                     start, draw(st.sampled_from([d, d, 64, 37])),
                     draw(st.sampled_from([dtype, dtypes.float32])),
                     draw(st.sampled_from(["bhr", "brh"])), draw(st.sampled_from([0, 0, 1, 2, 4])), symbolic,
                     draw(st.booleans()))
    most = {"s_q": (0, s_q), "s_kv": (0, s_kv), "start": (0, start)}
    return spec, {name: draw(st.integers(*most[name])) for name in symbolic}


def check(case: Case, level: ISA, block_n: int, parts: int, seed: int) -> None:
    """Near the exact answer, and the same bits in any number of parts, taken in any order."""
    spec, extents = case
    memory, schedule = arguments(spec, seed), scheduled(spec, level, block_n=block_n)
    got = run(loaded(spec, schedule), spec, memory, **extents)
    if 0 not in (extents.get("s_q"), extents.get("s_kv")): near(spec, memory, got, **extents)
    elif extents.get("s_q"): assert (got[0] == 0).all()
    if parts:
        divided = loaded(spec, scheduled(spec, level, block_n=block_n, parts=parts))
        same(got, run(divided, spec, memory, order=range(parts)[::-1], **extents))


LEVEL, BLOCK_N = st.sampled_from(LEVELS), st.sampled_from([64, 64, 32, 128])


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(specs(), LEVEL, BLOCK_N, st.integers(0, 3))
def test_generated(case: Case, level: ISA, block_n: int, seed: int): check(case, level, block_n, 0, seed)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(specs(), LEVEL, BLOCK_N, st.integers(0, 7), st.integers(0, 3))
def test_generated_more(case: Case, level: ISA, block_n: int, parts: int, seed: int):
    check(case, level, block_n, parts, seed)
