"""Generated results and epilogues, bit for bit: extents, majors, gaps, batches, dtypes, ways to memory."""
from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import DType, dtypes

from tests.support.tile.gemm_case import arguments, operand, product, reference, result, run
from tests.support.tile.store_case import GROUPS, HALF, OUTS, SINGLE, SMALL, WARPS, exact, outer, spec_of
from tinygrad_nv.tile.expression import (
    Expression,
    Load,
    Position,
    Sum,
    gelu,
    gelu_tanh,
    quick_gelu,
    relu,
    silu,
    where,
)
from tinygrad_nv.tile.gemm.schedules import Mma, Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec

EXTENTS = st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 128, 136, 200]))
SCHEDULES = st.sampled_from([(SMALL, "sm_80"), (WARPS, "sm_80"), (WARPS, "sm_90a"), (GROUPS, "sm_90a"),
                             (GROUPS.block(64, 128).warps(8), "sm_90a"),
                             (Mma().block(64, 48).warps(1, 1), "sm_89")])


@settings(max_examples=20, deadline=None)
@given(EXTENTS, EXTENTS, st.sampled_from([(), (2,), (2, 1, 2)]), st.sampled_from("NM"),
       st.sampled_from([0, 0, 1, 8]), st.sampled_from(OUTS), SCHEDULES, st.integers(0, 3))
def test_every_result(m: int, n: int, batch: tuple[int, ...], major: str, gap: int, out: DType,
                      way: tuple[Mma | Wgmma, str], seed: int):
    schedule, arch = way
    if out == dtypes.fp8e4m3 and arch == "sm_80": arch = "sm_89"
    exact(spec_of(out, m, n, batch=batch, out_major=major, gap=gap), schedule, arch, seed)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(EXTENTS, EXTENTS, st.sampled_from([(), (2,)]), st.sampled_from("NM"), st.sampled_from([0, 1, 8]),
       st.sampled_from([HALF, dtypes.float16, SINGLE]), SCHEDULES, st.integers(0, 3),
       st.lists(st.sampled_from(["row", "column", "scalar", "residual", "turned", "mask"]), max_size=3),
       st.booleans())
def test_every_epilogue_of_integers(m: int, n: int, batch: tuple[int, ...], major: str, gap: int, out: DType,
                                    way: tuple[Mma | Wgmma, str], seed: int, ends: list[str], gate: bool):
    schedule, arch = way
    node = Sum().cast(out)
    for parameter, what in enumerate(ends):
        strides = {"row": (1, 0), "column": (0, 1), "scalar": (0, 0), "residual": (n + gap, 1),
                   "turned": (1, m), "mask": (0, 1)}[what]
        matrix = m * (n + gap) if what in ("residual", "turned") else 0
        load = Load(parameter, out, *strides, (matrix,) * len(batch))
        if what == "mask": node = where(load < 1.0, node, -2.0)
        else: node = node * load if what in ("row", "scalar") else node + load
    if gate: node = where(node > 0.0, node, 0.0)
    exact(product(m, n, 1, HALF, out=out, batch=batch, out_major=major, gap=gap, epilogue=node), schedule,
          arch, seed)


ACTIVATIONS = [relu, silu, quick_gelu, gelu, gelu_tanh]
UNITS = {HALF: 2.0**-8, dtypes.float16: 2.0**-11, SINGLE: 2.0**-22}
STEPS = ["row bias", "column bias", "residual", "row scale", "column scale", "scalar", "cast", "mask",
         "activation"]


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(EXTENTS, st.sampled_from([8, 48, 72, 128, 33]), st.sampled_from([HALF, dtypes.float16, SINGLE]),
       SCHEDULES, st.lists(st.sampled_from(STEPS), max_size=4), st.sampled_from(ACTIVATIONS), st.booleans(),
       st.sampled_from([HALF, dtypes.float16, SINGLE]))
def test_every_combination_of_what_follows(m: int, n: int, kind: DType, way: tuple[Mma | Wgmma, str],
                                           ends: list[str], activation: Callable[[Expression], Expression],
                                           gate: bool, out: DType):
    """Random numbers, each node rounded to its dtype: within eight roundings, for what one of them may do to
    those after it. With `gate` of two parts, activation(first) times the second."""
    schedule, arch = way
    node = Sum().cast(kind)
    if gate: node = activation(node) * Sum(SINGLE, 1).cast(kind)
    parameter = 0
    for what in ends:
        strides = {"row bias": (1, 0), "row scale": (1, 0), "column bias": (0, 1), "column scale": (0, 1),
                   "residual": (n, 1), "scalar": (0, 0)}.get(what)
        if strides is not None:
            load, parameter = Load(parameter, node.dtype, *strides), parameter + 1
            node = node * load if what.endswith(("scale", "scalar")) else node + load
        elif what == "cast": node = node.cast(SINGLE if node.dtype == kind else kind)
        elif what == "mask": node = where(Position("n") < Position("m") + 3, node, -1.5)
        else: node = activation(node)
    node = node.cast(out)
    a, b = operand(HALF, m, 1), operand(HALF, n * (1 + gate), 1)
    spec = GemmSpec(m, n, 1, a, b, result(out, m, n), (), node, 1 + gate, n * gate)
    values = arguments(spec, m + n, integers=False)
    got, want = run(outer(spec, schedule, arch), spec, values, arch), reference(spec, values)
    unit = max(UNITS[each] for each in (kind, out))
    assert ((got - want).abs() <= 8 * unit * (1 + want.abs())).all()
    assert (got == want).double().mean() > 0.9
