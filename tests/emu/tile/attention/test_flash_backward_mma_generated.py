"""Generated backward passes through the mma.sync template: any heads, extents, bands, scores, layouts."""
from __future__ import annotations

import math

from backward_case import arguments, backward, near, run
from flash_backward_mma_case import BF16, F16, F32, SMALL, scheduled
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.schedules import BackwardMma
from tinygrad_nv.tile.attention.spec import SYMBOLS, Band
from tinygrad_nv.tile.expression import Constant, Expression, Load, Position, Sum, tanh, where
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

EDGE = st.one_of(st.none(), st.integers(-120, 60))
HEADS = st.one_of(st.sampled_from([32, 64, 96, 128]), st.integers(1, 14).map(lambda n: 8 * n))
ROWS = st.one_of(st.integers(1, 150), st.sampled_from([32, 64, 128]))


@st.composite
def scores(draw: st.DrawFn, s_kv: int) -> Expression:
    """Scaled sums, with something beside."""
    scaled = Sum() * draw(st.sampled_from([0.1, 1 / math.sqrt(64), -0.2, 0.5]))
    distance = Position("n").cast(F32) - Position("m").cast(F32)
    return draw(st.sampled_from([
        scaled, scaled, scaled + distance * 0.01, tanh(scaled) * 3.0,
        where(Load(0, dtypes.bool, s_kv, 1), scaled, Constant(-math.inf)),
        where(Load(0, dtypes.bool, 0, 1), tanh(scaled) * 3.0, Constant(-math.inf)),
        scaled + Load(0, F32, s_kv, 1), scaled * Load(0, F32, 1, 0)]))


@st.composite
def specs(draw: st.DrawFn, kinds: tuple[DType, ...] = (BF16, F16),
          heads: st.SearchStrategy[int] = HEADS) -> tuple[BackwardSpec, dict[str, int]]:
    """A spec, and extents of a launch."""
    s_q, s_kv, start = draw(ROWS), draw(ROWS), draw(st.integers(0, 90))
    chosen = draw(st.sets(st.sampled_from(SYMBOLS)))
    symbolic = tuple(name for name in SYMBOLS if name in chosen)
    first, last = draw(EDGE), draw(EDGE)
    if first is not None and last is not None: first, last = min(first, last), max(first, last)
    spec = backward(s_q, s_kv, draw(heads), draw(st.sampled_from(kinds)), batch=draw(st.integers(1, 2)),
                    heads=draw(st.integers(1, 2)), group=draw(st.integers(1, 3)), band=Band(first, last),
                    score=draw(scores(s_kv)), start=start, d_v=draw(st.one_of(st.none(), heads)),
                    out=draw(st.sampled_from([BF16, F16, F32])), order=draw(st.sampled_from(["bhr", "brh"])),
                    gap=draw(st.sampled_from([0, 2, 8])), symbolic=symbolic,
                    deterministic=draw(st.booleans()))
    least = {"s_q": 1, "s_kv": 1, "start": 0}
    most = {"s_q": s_q, "s_kv": s_kv, "start": start}
    return spec, {name: draw(st.integers(least[name], most[name])) for name in symbolic}


@st.composite
def schedules(draw: st.DrawFn) -> BackwardMma:
    """Up to 32 keys of a warp, which up to 4 warps share."""
    warps, tiles, sharing = (draw(st.sampled_from(each)) for each in ((1, 2, 4), (1, 2), (1, 1, 2, 4)))
    return scheduled(draw(st.sampled_from([32, 64])), 16 * warps * tiles, warps, draw(st.integers(2, 4))) \
        .warps(warps, sharing)


@settings(max_examples=25, deadline=None)
@given(specs(), schedules(), st.sampled_from(["sm_80", "sm_89", "sm_90a"]), st.integers(0, 3))
def test_generated(case: tuple[BackwardSpec, dict[str, int]], schedule: BackwardMma, arch: str, seed: int):
    spec, extents = case
    if TABLE.problems(spec, schedule, GPU(arch)): schedule = SMALL
    if TABLE.problems(spec, schedule, GPU(arch)): schedule = SMALL.warps(2, 2)
    memory = arguments(spec, seed, **extents)
    made = TABLE.build(spec, schedule, GPU(arch))
    near(spec, memory, run(made, spec, memory, arch, seed, **extents), **extents)
