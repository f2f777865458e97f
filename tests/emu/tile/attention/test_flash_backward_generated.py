"""Generated backward passes through both templates: any heads, extents, bands, scores, layouts, schedules."""
from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import DType, dtypes

from tests.support.tile.backward_case import backward
from tests.support.tile.flash_backward_case import (
    HALVED,
    LOW,
    MMA,
    SHARED,
    SMALL,
    WGMMAS,
    BackwardSchedule,
    close,
    mma,
)
from tests.support.tile.flash_case import BF16, CAUSAL, F16, F32
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.spec import FULL, SYMBOLS, Band
from tinygrad_nv.tile.expression import Constant, Expression, Load, Position, Sum, tanh, where
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

EDGE = st.one_of(st.none(), st.integers(-150, 60))
HEADS = st.one_of(st.sampled_from([32, 64, 96, 128]), st.integers(1, 16).map(lambda n: 8 * n))
ROWS = st.one_of(st.integers(1, 150), st.sampled_from([32, 64, 128]))
LONGER = st.one_of(st.integers(1, 200), st.sampled_from([64, 128, 192]))
WIDER = st.one_of(HEADS, HEADS, st.sampled_from([192, 256]))
# what a spec is drawn from, architectures, schedules that are legal most often, examples
SIDES: dict[str, tuple[dict[str, Any], list[str], tuple[BackwardSchedule, ...], int]] = {
    "mma": ({}, list(SMEM_BYTES), (MMA, SHARED), 25),
    "wgmma": ({"heads": WIDER, "rows": LONGER, "gaps": [0, 8]}, ["sm_90a"], (LOW, SMALL, HALVED), 8)}


@st.composite
def scores(draw: st.DrawFn, s_q: int, s_kv: int) -> Expression:
    """Scaled sums, with something beside."""
    scaled = Sum() * draw(st.sampled_from([0.1, 1 / math.sqrt(64), -0.2, 0.5, 1.0]))
    distance = Position("n").cast(F32) - Position("m").cast(F32)
    biased = scaled + Load(0, F32, s_kv + 1, 1, (0, 0, s_q * (s_kv + 1)))
    return draw(st.sampled_from([
        scaled, scaled, scaled + distance * 0.01, tanh(scaled) * 3.0,
        where(Load(0, dtypes.bool, s_kv, 1), scaled, Constant(-math.inf)),
        where(Load(0, dtypes.bool, 0, 1), tanh(scaled) * 3.0, Constant(-math.inf)),
        scaled + Load(0, F32, s_kv, 1), scaled * Load(0, F32, 1, 0), biased, tanh(biased * 0.5) * 2.0]))


@st.composite
def specs(draw: st.DrawFn, kinds: tuple[DType, ...] = (BF16, F16), heads: st.SearchStrategy[int] = HEADS,
          rows: st.SearchStrategy[int] = ROWS,
          gaps: tuple[int, ...] = (0, 2, 8)) -> tuple[BackwardSpec, dict[str, int]]:
    """A spec, and extents of a launch."""
    s_q, s_kv, d, start = draw(rows), draw(rows), draw(heads), draw(st.integers(0, 100))
    chosen = draw(st.sets(st.sampled_from(SYMBOLS)))
    symbolic = tuple(name for name in SYMBOLS if name in chosen)
    spec = backward(s_q, s_kv, d, draw(st.sampled_from(kinds)), batch=draw(st.integers(1, 2)),
                    heads=draw(st.integers(1, 2)), group=draw(st.integers(1, 3)),
                    band=draw(st.sampled_from([FULL, CAUSAL, *2 * [Band(draw(EDGE), draw(EDGE))]])),
                    score=draw(scores(s_q, s_kv)), start=start, d_v=draw(st.one_of(st.just(d), heads)),
                    out=draw(st.sampled_from([BF16, F16, F32])), order=draw(st.sampled_from(["bhr", "brh"])),
                    gap=draw(st.sampled_from(gaps)), symbolic=symbolic, deterministic=draw(st.booleans()))
    most = {"s_q": (1, s_q), "s_kv": (1, s_kv), "start": (0, start)}
    return spec, {name: draw(st.integers(*most[name])) for name in symbolic}


@st.composite
def schedules(draw: st.DrawFn, template: str) -> BackwardSchedule:
    """Of mma, up to 32 keys of a warp, which up to 4 warps share."""
    def pick(*choices: Any) -> Any: return draw(st.sampled_from(choices))

    if template == "wgmma": return pick(*WGMMAS).stages(pick(2, 3))
    warps = pick(1, 2, 4)
    return mma(pick(32, 64), 16 * warps * pick(1, 2), warps, pick(1, 1, 2, 4), pick(2, 3, 4))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("template", SIDES)
def test_generated(template: str):
    drawn_from, archs, legal, examples = SIDES[template]

    @settings(max_examples=examples, deadline=None)
    @given(specs(**drawn_from), schedules(template), st.sampled_from(archs), st.integers(0, 3))
    def drawn(case: tuple[BackwardSpec, dict[str, int]], schedule: BackwardSchedule, arch: str,
              seed: int) -> None:
        spec, extents = case
        possible = [one for one in (schedule, *legal) if not TABLE.problems(spec, one, GPU(arch))]
        assert possible or template == "wgmma"
        for one in possible[:1]: close(spec, one, arch, seed, **extents)

    drawn()
