"""Results in memory: every way, major, alignment, edge and dtype, bit for bit, and nothing beside them;
staged ones without a bank conflict and in full sectors. Generated ones, too."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product as every

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import DType, dtypes

from tests.support.tile.gemm_case import arguments, launched, operand, product, reference, result, run
from tests.support.tile.store_case import (
    GROUPS,
    HALF,
    OUTS,
    SINGLE,
    SMALL,
    WARPS,
    exact,
    outer,
    planned,
    spec_of,
)
from tinygrad_nv.errors import SpecError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.tile.attention.mma.plan import FlashMmaPlan
from tinygrad_nv.tile.attention.schedules import FlashMma
from tinygrad_nv.tile.attention.spec import AttentionSpec, Rows
from tinygrad_nv.tile.expression import (
    Constant,
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
from tinygrad_nv.tile.gemm.spec import GemmSpec, Result
from tinygrad_nv.tile.store_plan import with_map

WAYS = [(WARPS, "sm_80"), (WARPS, "sm_90a"), (GROUPS, "sm_90a")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("out", [HALF, dtypes.float16, SINGLE])
def test_every_major_edge_and_gap(arch: str, out: DType):
    for (m, n), gap, major, batch in every([(32, 32), (40, 50), (17, 33)], [0, 1, 8], "NM", [(), (2, 3)]):
        exact(product(m, n, 1, HALF, out=out, out_major=major, gap=gap, batch=batch), SMALL, arch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS, ids=["sm_80", "sm_90a", "TMA"])
@pytest.mark.parametrize("out", OUTS, ids=lambda dtype: dtype.name)
def test_staged_results_of_every_dtype(out: DType, way: tuple[Mma | Wgmma, str]):
    """Full tiles: no access to shared memory waits for a bank, no store to global memory is of part of a
    sector."""
    schedule, arch = way
    if out == dtypes.fp8e4m3 and arch == "sm_80": arch = "sm_89"
    for major, batch in every("NM", [(), (2, 1, 2)]):
        spec = spec_of(out, 128, 128, out_major=major, batch=batch)
        assert planned(spec, schedule).panel is not None
        exact(spec, schedule, arch)
        made, values = outer(spec, schedule, arch), arguments(spec)
        stats = launched(made, spec, values, arch)[1].stats
        assert stats.bank_conflicts == {}
        stores = [site for site in stats.sites if site.requests and site.opcode.startswith("st.global")]
        assert all(site.sectors == 16 * site.requests for site in stores)
        assert bool(stores) == (schedule is WARPS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS, ids=["sm_80", "sm_90a", "TMA"])
@pytest.mark.parametrize("out", OUTS, ids=lambda dtype: dtype.name)
def test_edges_of_staged_results(out: DType, way: tuple[Mma | Wgmma, str]):
    schedule, arch = way
    if out == dtypes.fp8e4m3 and arch == "sm_80": arch = "sm_89"
    for (m, n), major in every([(136, 80), (16, 48)], "NM"):
        exact(spec_of(out, m, n, out_major=major, batch=(2,)), schedule, arch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
def test_persistent_ctas_reuse_their_memory(seed: int):
    """Tiles of one, two and three panels, one after the other: TMA reads late or early."""
    for n, major in every([64, 128, 192], "NM"):
        spec = spec_of(HALF, 256, 2 * n, out_major=major)
        exact(spec, GROUPS.block(128, n), "sm_90a", seed, ctas=2)
        exact(spec, WARPS.block(64, 128 if n == 128 else 64), "sm_90a", seed, ctas=2)
    exact(spec_of(SINGLE, 200, 300), GROUPS.block(128, 96), "sm_90a", seed, ctas=1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS, ids=["sm_80", "sm_90a", "TMA"])
def test_results_of_bytes_and_booleans_and_halves_of_words(way: tuple[Mma | Wgmma, str]):
    schedule, arch = way
    for major in "NM":
        exact(spec_of(dtypes.int16, 136, 80, out_major=major,
                      epilogue=Sum(dtypes.int32).cast(dtypes.int16)), schedule, arch)
    products = Sum(dtypes.int32)
    for node, out in ((products.cast(dtypes.uint8), torch.uint8),
                      (products < Constant(1, dtypes.int32), torch.bool)):
        spec = product(64, 128, 1, dtypes.int8, out=node.dtype, epilogue=node)
        values = arguments(spec)
        exactly = values["a"].int()[:, None] * values["b"].int()[None, :]
        want = exactly < 1 if out == torch.bool else exactly.to(out)
        assert (launched(outer(spec, schedule, arch), spec, values, arch)[0].view(64, 128) == want).all()


def test_rows_that_are_known_at_launch():
    for major, schedule in every("NM", (WARPS, GROUPS)):
        spec = spec_of(HALF, 200, 136, out_major=major, symbolic=True)
        values = arguments(spec)
        for m in (1, 64, 131, 200):
            got = run(outer(spec, schedule, "sm_90a"), spec, values, "sm_90a", m=m)
            assert (got == reference(spec, values)[:m]).all()


@pytest.mark.parametrize(("n", "gap", "major", "rows", "found"), [
    (136, 0, "M", 1, "elements beside the result were written"),
    (136, 0, "M", 131, "elements beside the result were written"),
    (131, 5, "N", 200, "out-of-bounds")])
def test_tma_of_lines_that_end_within_a_chunk_is_found(monkeypatch: pytest.MonkeyPatch, n: int, gap: int,
                                                       major: str, rows: int, found: str):
    """As an H100 does, TMA writes all of the last 16 bytes: a plan that stores such lines by TMA writes
    beside the result (the first two launches did: 8 elements for 1, 136 for 131) or beyond the memory."""
    spec = spec_of(HALF, 200, n, out_major=major, gap=gap, symbolic=rows < 200)
    plan = with_map(planned(spec_of(HALF, 200, 136, out_major=major), GROUPS), spec.store_target)
    assert plan.map is not None
    assert planned(spec, GROUPS).map is None
    monkeypatch.setattr("tests.support.tile.store_case.planned", lambda *_: plan)
    with pytest.raises(AssertionError, match=found):
        run(outer(spec, GROUPS, "sm_90a"), spec, arguments(spec), "sm_90a", m=rows)


def test_what_rows_of_16_bytes_need():
    """Which way a result goes."""
    def way(schedule: Mma | Wgmma = GROUPS, **more: object) -> str:
        return str(planned(product(200, 136, 1, HALF, **more), schedule))  # type: ignore[arg-type]
    assert way() == "TMA, panels of 64 x 128 B"
    assert way(WARPS) == "16 B a thread, panels of 16 x 128 B"
    assert way(gap=8) == "TMA, panels of 64 x 128 B"
    assert way(gap=1) == way(WARPS, gap=4) == "elements"
    assert way(WARPS, out_major="M", symbolic=True) == "elements"
    assert way(WARPS, out_major="M") == "16 B a thread, panels of 32 x 64 B"


def test_a_plan_without_its_memory_stores_elements():
    spec = spec_of(HALF, 128, 128)
    assert planned(spec, WARPS).smem_bytes == 4 * 2 * 16 * 128
    assert planned(spec, GROUPS).smem_bytes == 2 * 2 * 64 * 128
    assert "st.shared" not in outer(spec, WARPS, "sm_80", staging=False).ptx
    values = arguments(spec)
    assert (run(outer(spec, WARPS, "sm_80", staging=False), spec, values) == reference(spec, values)).all()


@pytest.mark.parametrize("major", "NM")
def test_a_residual_is_read_before_a_warp_overwrites_it(major: str):
    pitch = 128 if major == "N" else 64
    residual = Load(0, HALF, *((pitch, 1) if major == "N" else (1, pitch)))
    exact(spec_of(HALF, 64, 128, out_major=major, epilogue=Sum().cast(HALF) + residual), *WAYS[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS, ids=["sm_80", "sm_90a", "TMA"])
def test_residuals_are_read_in_full_sectors(way: tuple[Mma | Wgmma, str]):
    """By way of the panel the result will have; not where their rows are no multiples of 16 bytes."""
    schedule, arch = way
    for major, (m, n, gap) in every("NM", [(64, 128, 0), (64, 128, 4), (136, 72, 0)]):
        pitch = gap + (n if major == "N" else m)
        residual = Load(0, HALF, *((pitch, 1) if major == "N" else (1, pitch)))
        epilogue = Sum().cast(HALF) * Load(1, HALF, 0, 1) + residual
        spec = spec_of(HALF, m, n, out_major=major, epilogue=epilogue)
        exact(spec, schedule, arch)
        stats = launched(outer(spec, schedule, arch), spec, arguments(spec), arch)[1].stats
        wide = [site for site in stats.sites if site.requests and site.opcode == "ld.global.v4.b32"]
        assert stats.bank_conflicts == {}
        assert bool(wide) == (gap == 0)
        assert m % 64 or all(site.sectors == 16 * site.requests for site in wide)


def test_instructions_of_a_panel():
    """64 × 128 bytes of bfloat16 for each warpgroup: 4 stmatrix of 4 matrices a warp, one TMA store."""
    text = outer(spec_of(HALF, 128, 128), GROUPS, "sm_90a").ptx
    assert text.count("stmatrix.sync.aligned.m8n8.x4") == 4
    assert text.count("cp.async.bulk.tensor") == 1
    assert assemble(text, "sm_90a").kernels["outer"].spill_store_bytes == 0


def test_results_whose_elements_overlap_are_refused():
    spec = product(64, 32, 1, HALF)
    with pytest.raises(SpecError, match=r"a result with strides \[1, 16\] of extents \[32, 64\]"):
        replace(spec, out=replace(spec.out, m=16))
    rows = Rows(HALF, 128, (128 * 48, 64, 0))   # two heads of 64 elements side by side
    attention = AttentionSpec(48, 48, 64, 64, rows, rows, rows, rows, (1, 2, 1))
    assert FlashMmaPlan.of(attention, FlashMma()).store_target.out == Result(HALF, 128, 1, rows.batch)
    with pytest.raises(SpecError, match="elements that lie apart"):
        _ = FlashMmaPlan.of(replace(attention, out=replace(rows, row=96)), FlashMma()).store_target


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
