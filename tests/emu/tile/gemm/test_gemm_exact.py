"""Integers come out of every template exactly, kernel property by kernel property: pipelines that go round,
consumers in turns, clusters, splits, edges, dtypes, strides, parts, rows known at launch. A property is a row
of a table; test_gemm_generated.py draws what lies between."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product as pairs
from typing import Any

import pytest
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.tile.gemm_case import arguments, exactly, operand, product, reference, result, run
from tests.support.tile.gemv_case import ARCHES, GEMV, best, exact, scheduled
from tinygrad_nv.tile import tile_scheduler as walk
from tinygrad_nv.tile.expression import Constant, Expression, Load, Position, Sum, relu
from tinygrad_nv.tile.gemm.gemv.plan import GemvPlan
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Mma, Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F16, BF16, F32 = dtypes.float16, dtypes.bfloat16, dtypes.float32
S8, U8, E4M3, E5M2 = dtypes.int8, dtypes.uint8, dtypes.fp8e4m3, dtypes.fp8e5m2
MAJORS = ("KK", "KM", "MK", "MM")
M, W = Mma(), Wgmma()
M64 = M.block(64, 64).k(32).warps(2, 2).stages(3)
W64 = W.block(128, 64)
SWAPPED = W.block(64, 16).warps(8).swap_operands()


def each(what: str, arch: str, made: Iterable[tuple[GemmSpec, GemmSchedule]], seeds: int = 1,
         rows: Sequence[int | None] = (None,), **how: Any) -> list[Any]:
    """Cases of a property; every one of `seeds` runs warps in another order."""
    return [pytest.param(spec, schedule, arch, {"seed": seed, "m": m, **how},
                         id=f"{schedule.template}-{what}-{i}-{seed}-{m}")
            for i, (spec, schedule) in enumerate(made) for seed in range(seeds) for m in rows]


def mixed(m: int, n: int, k: int, a: DType, b: DType, majors: str = "KK", gap: int = 0) -> GemmSpec:
    """A product of two dtypes into float32, or int32."""
    spec = product(m, n, k, a, exact(a), majors, gap)
    return replace(spec, b=replace(spec.b, dtype=b))


def parted(m: int, n: int, k: int, parts: int, epilogue: Expression, dtype: DType = F16, major: str = "K",
           out: DType = F32, columns: int = 0, between: int = 0, offset: int = 0) -> GemmSpec:
    """x · gateᵀ and x · upᵀ of one weight: parts side by side, or `between` columns apart in rows of
    `columns`."""
    weight = replace(operand(dtype, columns or parts * n, k, major), offset=offset)
    part = n + between if between else n * weight.mn
    return replace(product(m, n, k, dtype, out), b=weight, parts=parts, part=part, epilogue=epilogue)


def relu_gate(out: DType) -> Expression:
    """relu(gate) × up, which integers hold."""
    return (Sum().maximum(0.0) * Sum(part=1)).cast(out)


# **** mma ****

def mma_for(dtype: DType) -> GemmSchedule: return M64.k(64 // dtype.itemsize)


KINDS = [(F32, F32), (S8, S8), (U8, U8), (S8, U8), (U8, S8), (E4M3, E4M3), (E5M2, E5M2), (E4M3, E5M2)]
ADDED = relu(Sum().cast(BF16) + Load(0, BF16, 0, 1, (3,))) + Load(1, BF16, 41, 1, (33 * 41,), 2)
BYTES_APART = (Sum(dtypes.int32) - Sum(dtypes.int32, part=1)).cast(dtypes.int32)
MMA = [
    # seven tiles along K, copies late and early
    *each("rings", "sm_80", ((product(70, 40, 7 * 32, BF16, F32), M64.stages(s)) for s in (2, 3, 4)), 4),
    *each("results-with-strides", "sm_80", (
        (replace(product(70, 40, 96, F16, out), out=Result(out, m, n, (), offset)), M64) for out in (F16, F32)
        for m, n, offset in ((1, 77, 0), (123, 3, 1), (2, 200, 5), (41, 1, 3)))),
    *each("rows-at-launch", "sm_80", [(product(150, 40, 160, BF16, F32, symbolic=True), M64)],
          rows=(1, 63, 64, 65, 150)),
    *each("bias-and-residual", "sm_80", [(product(33, 41, 64, BF16, batch=(2,), epilogue=ADDED), M64)]),
    # five tiles along K and a part of one, rows of odd numbers of bytes too
    *[case for (a, b), majors in pairs(KINDS, MAJORS)
      for case in each(f"dtypes-{a.name}-{b.name}-{majors}", "sm_89" if a in (E4M3, E5M2) else "sm_80", (
          (mixed(m, n, k * 2 // a.itemsize, a, b, majors, gap), mma_for(a))
          for m, n, k, gap in ((64, 64, 320, 0), (70, 41, 331, 3), (48, 80, 336, 16))))],
    *each("fp8-on-hopper", "sm_90a", [(mixed(64, 64, 320, E4M3, E5M2), mma_for(E4M3))]),
    *each("all-of-a-byte", "sm_80", [(mixed(64, 64, 320, U8, S8, "KM"), mma_for(U8))], most=127),
    *each("each-part-has-its-own-sum", "sm_80", (
        (parted(70, 40, 160, parts, Sum(part=parts - 1) - Sum() * 2.0), schedule) for parts in (2, 3, 4)
        for schedule in (M.block(32, 32 * parts).warps(2, 2), M.block(32, 16 * parts).warps(2, 1)))),
    # 64 columns of each part in rows of 256, the second part's 64 and some columns after the first's
    *each("parts-aligned-as-the-first-is-not", "sm_80", (
        (parted(64, 64, 96, 2, Sum() - Sum(part=1) * 2.0, major="MN", columns=256, between=between, offset=8),
         M.block(64, 128).warps(2, 2)) for between in (1, 2, 8))),
    *each("parts-of-bytes-in-splits", "sm_80", [
        (parted(40, 24, 512, 2, BYTES_APART, S8, out=dtypes.int32),
         M.block(32, 64).k(64).warps(2, 2).split(3))]),
    *each("splits", "sm_80", (
        (product(70, 50, k, BF16, batch=(2,), out=F32, epilogue=relu(Sum() + Load(0, F32, 0, 1, (0,)))),
         M.block(64, 32).k(32).warps(2, 1).stages(2).split(splits))
        for k, splits in ((64 * 8, 2), (500, 3), (7 * 32, 7), (97, 4), (33, 2), (97, 3), (129, 4))), 4),
    *each("splits-of-rows-at-launch", "sm_80", [
        (product(150, 40, 160, BF16, F32, symbolic=True), M64.split(2))], rows=(1, 64, 130)),
    *each("every-tile-once", "sm_80", (
        (product(m, n, 32, F16, F32), M.block(32, 32).k(16).warps(1, 1).stages(2).group_rows(group))
        for group in (1, 2, 3, 8) for m, n in ((160, 96), (96, 160), (128, 64), (20, 100), (100, 20)))),
    *each("groups-of-rows-at-launch", "sm_80", [
        (product(320, 96, 32, F16, F32, symbolic=True), M.block(32, 32).warps(2, 2).group_rows(3))],
        rows=(33, 200, 320)),
    *each("swapped", "sm_80", [(product(20, 200, 96, F16, F32, "KM"), M64.swap_operands())])]

# **** wgmma ****

ROW_AND_COLUMN = Sum() + Load(0, F32, 0, 1) + Load(1, F32, 1, 0)
ONE = product(1, 1, 40)
WGMMA = [
    # more iterations than stages, in one tile and over the tiles of a persistent CTA
    *each("rings", "sm_90a", (
        (product(200, 130, 64 * (s + 2), BF16, F32), W64.stages(s)) for s in (2, 3, 4, 7)), 4, sm_count=2),
    # as many as stages, and one more; the second consumer multiplies the last alone
    *each("consumers-end-in-turn", "sm_90a", (
        (product(200, 130, 64 * (s + more), BF16, F32), W64.stages(s).cluster(*cluster))
        for s in (2, 3, 4) for more in (0, 1) for cluster in ((1, 1), (2, 1))), sm_count=2),
    # an odd and an even number of rounds of the ring between one's turns
    *each("turns", "sm_90a", (
        (product(500, 130, 64 * k, BF16, F32), W.block(64, 64).warps(warps).stages(3).pingpong())
        for warps, k in ((12, 5), (12, 8), (16, 7))), 4, sm_count=2),
    *each("fewer-tiles-than-consumers", "sm_90a", [
        (product(50, 30, 64 * 6), W.block(64, 32).warps(16).pingpong())], sm_count=1),
    # tiles at the edge of the result, clusters that reach beyond it, two tiles a CTA
    *each("clusters", "sm_90a", (
        (product(304, 200, 64 * 5, BF16, F32, majors), s)
        for cluster in ((2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2))
        for s in (W64.stages(3).cluster(*cluster), W64.stages(3).cluster(*cluster).pingpong())
        for majors in ("KK", "MM")), 2, sm_count=8),
    # parts of unequal length, each longer than the ring; 8 splits have fewer panels of columns than CTAs
    *each("splits", "sm_90a", (
        (product(200, 200, 64 * (5 * splits + 3), BF16, F32), W.block(128, 128).stages(3).split(splits))
        for splits in (2, 4, 8)), 4),
    *each("splits-of-rows-at-launch", "sm_90a", [
        (product(200, 72, 64 * 9, BF16, F32, batch=(2,), symbolic=True), W64.split(2))], rows=(1, 128, 200)),
    # 4 tiles of 11 stages: CTAs with several tiles, with the end of one and the beginning of another, and
    # tiles of five CTAs
    *[case for count in (1, 2, 5, 9, 16) for case in each(f"stream-K-{count}", "sm_90a", [
        (product(200, 130, 64 * 11, BF16, F32), W.block(128, 72).stages(3).stream_k())], 4, sm_count=count)],
    # 6 tiles of 11 stages: a part of one, all of them, one or two whole ones besides, and no part
    *[case for count in (1, 2, 3, 4, 5, 9) for case in each(f"stream-K-of-clusters-{count}", "sm_90a", [
        (product(m, 200, 64 * 11, BF16, F32), W.block(128, 80).stages(3).cluster(*cluster).stream_k())
        for m, cluster in ((500, (2, 1)), (200, (1, 2)))], 2, sm_count=2 * count)],
    # a stage a tile: one too many would be of a matrix that is not there
    *each("stream-K-of-one-stage", "sm_90a", [
        (product(200, 130, 64, BF16, F32, batch=(2,)), W.block(128, 72).stages(3).stream_k())], sm_count=3),
    *each("stream-K-of-rows-at-launch", "sm_90a", [
        (product(300, 72, 64 * 7, BF16, F32, batch=(2,), symbolic=True), s)
        for s in (W64.stream_k(), W64.stages(3).stream_k().cluster(2))], rows=(1, 128, 300), sm_count=6),
    *each("every-tile-once", "sm_90a", (
        (product(m, 72, 64, BF16, F32, batch=(2,)), W.block(128, 16).group_rows(group))
        for group in (1, 2, 3, 5, 8) for m in (640, 600, 60)), sm_count=3),
    *each("widths", "sm_90a", (
        (product(136, columns + 16, 136, BF16, F32, majors), W.block(128, columns).stages(2))
        for columns in (8, 24, 40, 72, 104, 136, 168, 200, 232, 256) for majors in ("KK", "MM")), sm_count=4),
    *each("heights", "sm_90a", (
        (product(rows + 70, 40, 64 * 5, BF16, F32), W.block(rows, 32).warps(warps))
        for rows, warps in ((64, 8), (128, 8), (192, 8), (128, 12), (256, 12), (192, 16))), sm_count=2),
    *each("swizzles", "sm_90a", (
        (product(136, 136, 64 * 5, F16, F32, majors), W.block(128, 128).stages(3).swizzle(swizzle))
        for swizzle in ("32B", "64B", "128B") for majors in MAJORS)),
    # rows of 32 to 256 bytes: swizzles of every width, several boxes side by side, promotion by parts
    *each("dtypes", "sm_90a", (
        (mixed(136, 72, 6 * k // a.itemsize + 16, a, b), W64.k(k // a.itemsize).stages(3))
        for k in (32, 64, 128, 256) for a, b in ((E4M3, E4M3), (E5M2, E4M3), (S8, U8), (U8, U8), (F32, F32))),
        sm_count=2),
    *each("rows-at-launch", "sm_90a", (
        (product(304, 72, 64 * 6, BF16, F32, major + "K", batch=(2,), symbolic=True), W64.stages(3))
        for major in "KM"), rows=(1, 64, 128, 129, 304), sm_count=3),
    *each("swapped", "sm_90a", [
        (product(20, 200, 64 * 6, BF16, F32, epilogue=ROW_AND_COLUMN), W.block(128, 24).swap_operands())],
        sm_count=2),
    # weights are the 64 rows that wgmma multiplies at a time; six steps in a ring of four
    *each("few-rows-swapped", "sm_90a", (
        (product(m, 136, 6 * 64, out=F32, majors=majors), SWAPPED.block(64, columns))
        for m, columns in ((8, 8), (17, 24), (64, 64)) for majors in ("KK", "KM")), 2, sm_count=2),
    # a pitch of 6 bytes between rows that are not there
    *each("one-row-needs-no-pitch", "sm_90a", [
        (replace(ONE, a=replace(ONE.a, mn=3), b=replace(ONE.b, mn=3)), W64)])]


# **** gemv ****

def gemv(spec: GemmSpec, warps: int = 4, splits: int = 1, granules: int = 1) -> tuple[GemmSpec, GemmSchedule]:
    """One granule of columns, one step of K."""
    return spec, scheduled(spec, granules, 1, warps, splits)


def long(m: int, majors: str, rest: int = 24, steps: int = 15) -> GemmSpec:
    """`steps` iterations of K, and something left."""
    step = GemvPlan.of(product(m, 40, 2048, majors=majors), GEMV).step
    return product(m, 40, steps * step + rest, majors=majors, out=F32)


GATED = [(1, "KK", BF16), (6, "KK", BF16), (1, "KM", F16), (16, "KM", BF16), (7, "KK", F32), (3, "KM", F32),
         (2, "KK", E4M3)]


def shared_weights(batch: tuple[int, ...], strides: tuple[int, ...]) -> GemmSpec:
    """The same weights for all matrices of a dimension."""
    return GemmSpec(2, 10, 60, operand(BF16, 2, 60, batch=batch), Operand(BF16, 60, 1, strides),
                    result(F32, 2, 10, batch=batch), batch)


def strided(m: int, mn: int, k: int) -> GemmSpec:
    """Weights with gaps in both dimensions, and weights that are the same for all columns or all of K."""
    return GemmSpec(m, 45, 400, Operand(F16, 1, m + 2), Operand(F16, mn, k, offset=5), result(F32, m, 45))


def read(m: int) -> GemmSpec:
    """A bias, a residual of each matrix, positions."""
    ends = ((Sum() + Load(0, F32, 0, 1)).maximum(Constant(0.0)) + Load(1, F32, 30, 1, (m * 30,))
            + Position("m").cast(F32) + Position(0).cast(F32))
    return product(m, 30, 296, out=F32, batch=(3,), epilogue=ends)


GEMVS = [
    *[case for arch in ARCHES for case in each(f"long-{arch}", arch, (
        gemv(long(m, majors), 2, splits) for splits in (1, 3, 8, 11)
        for m, majors in ((1, "KK"), (1, "KM"), (5, "KK"), (9, "KM"))))],
    # lanes that have several rows of weights exchange sums of them, as long as their number is even
    *each("rows-of-lanes", "sm_80", (
        gemv(product(m, 45, k, dtype, exact(dtype), "KK"), warps, 1, granules)
        for granules, warps in ((2, 1), (3, 1), (4, 2), (6, 1), (8, 1)) for k in (40, 264)
        for m, dtype in ((1, BF16), (1, S8), (3, F32)))),
    *each("gates", "sm_90a", (
        gemv(parted(m, 40, 264, 2, relu_gate(F32), dtype, "K" if majors[1] == "K" else "MN"), splits=splits)
        for m, majors, dtype in GATED for splits in (1, 2))),
    *each("epilogues", "sm_90a", (gemv(read(m), splits=splits) for m in (1, 5) for splits in (1, 2))),
    *each("few-columns", "sm_80", (
        (spec, best(spec, "sm_80")) for dtype in (BF16, S8) for majors in ("KK", "MK", "KM") for out in "NM"
        for spec in [product(50, 5, 200, dtype, exact(dtype), majors, out_major=out, batch=(2,))])),
    *each("strides", "sm_80", (gemv(strided(m, *lies)) for m in (1, 4)
                               for lies in ((1500, 3), (3, 150), (0, 1), (2, 0)))),
    *each("shared-weights", "sm_80", [gemv(shared_weights((3,), (0,))),
                                      gemv(shared_weights((3, 2), (0, 600)))]),
    # query and output, key and value, gate or up, down, and the vocabulary of Llama 8B, by 64
    *[case for arch in ARCHES for case in each(f"llama-{arch}", arch, (
        (spec, best(spec, arch)) for m in (1, 2, 8, 16)
        for n, k in ((96, 128), (32, 128), (224, 64), (64, 448), (501, 64))
        for spec in [product(m, n, k, out=F32)]))]]


@pytest.mark.sampled(14)
@pytest.mark.parametrize(("spec", "schedule", "arch", "how"), [*MMA, *WGMMA, *GEMVS])
def test_integers_come_out_exactly(spec: GemmSpec, schedule: GemmSchedule, arch: str, how: dict[str, Any]):
    exactly(spec, schedule, arch, **how)


# **** what a table cannot say ****

@pytest.mark.parametrize("matrices", [4, 5, 7, 12])
def test_more_matrices_than_a_grid_is_high(matrices: int, monkeypatch: pytest.MonkeyPatch):
    """With a limit of 4 in place of 32768: three layers of three for seven, two CTAs of which leave."""
    monkeypatch.setattr(walk, "MOST_GRID_Y", 4)
    spec, schedule = product(20, 20, 40, F16, F32, batch=(matrices,)), M.block(32, 32).warps(1, 1)
    assert TABLE.build(spec, schedule, GPU("sm_80")).grid[1] <= 4
    exactly(spec, schedule)


def test_rows_of_tiles_that_groups_do_not_divide():
    """Three rows, in groups of two, of two columns."""
    exactly(product(300, 24, 64, BF16, F32), W.block(128, 16).group_rows(2), "sm_90a", sm_count=3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("clusters", [1, 2, 3])
def test_fewer_clusters_have_more_tiles_each(clusters: int):
    """8 tiles of a cluster, of which the GPU holds so many at once."""
    spec, s = product(1000, 200, 64 * 5, BF16, F32), W64.stages(3).cluster(2, 2)
    given, made = arguments(spec), TABLE.build(spec, s, GPU("sm_90a", clusters=((4, clusters),)))
    assert made.grid == (4 * clusters, 1, 1)
    assert torch.equal(run(made, spec, given, "sm_90a"), reference(spec, given))


def test_few_columns_are_the_transposed_product():
    for dtype in (BF16, S8): assert best(product(50, 5, 200, dtype, exact(dtype), batch=(2,)), "sm_80").swap


def test_float32_is_multiplied_in_float32():
    """By gemv: not in tf32, which has 10 bits: 1 + 2^-20 keeps its last one."""
    spec = product(2, 32, 128, F32)
    given = arguments(spec)
    given["a"].fill_(1 + 2**-20)
    given["b"].fill_(0)
    given["b"][::128] = 1
    assert (run(TABLE.build(spec, best(spec, "sm_80"), GPU("sm_80")), spec, given) == 1 + 2**-20).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("majors", ["KK", "KM"])
def test_every_fp8_number_is_read_as_it_is(dtype: DType, arch: str, majors: str):
    """Row n of the weights has number n at K = 0, and 0 after it: the result is the number, or NaN."""
    spec = product(1, 256, 32, dtype, F32, majors)
    given = arguments(spec)
    given["a"].fill_(0)
    given["a"][0] = 1.0
    given["b"].fill_(0)
    every = torch.arange(256, dtype=torch.uint8)
    given["b"].view(torch.uint8)[slice(0, None, 32) if majors == "KK" else slice(256)] = every
    got = run(TABLE.build(spec, scheduled(spec, 1, 1, 2, 1), GPU(arch)), spec, given, arch)
    want = every.view(given["b"].dtype).double()
    assert torch.equal(got[0].nan_to_num(1e9, 2e9, -2e9), want.nan_to_num(1e9, 2e9, -2e9))


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("majors", ["KK", "KM"])
def test_infinity_stays_infinity(m: int, majors: str):
    """What is left of K meets registers that had weights before: infinity times nothing would be NaN."""
    spec = long(m, majors, 8, 3)
    step = (spec.k - 8) // 3
    given = arguments(spec)
    given["a"].fill_(1)
    weights = given["b"].view(40, spec.k).T if majors == "KK" else given["b"].view(spec.k, 40)
    weights[2 * step:3 * step, 3] = torch.inf
    got = run(TABLE.build(spec, scheduled(spec, 1, 1, 1, 1), GPU("sm_80")), spec, given)
    assert torch.equal(got, reference(spec, given))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("schedule", "arch", "k"), [
    (mma_for(F16).split(5), "sm_80", 600), (W.block(128, 128).split(4), "sm_90a", 64 * 21),
    (W64.stream_k(), "sm_90a", 64 * 21), (4, "sm_80", 1000), (12, "sm_80", 1000), (4, "sm_90a", 1000),
    (12, "sm_90a", 1000)])
def test_shared_sums_are_the_same_every_time(schedule: GemmSchedule | int, arch: str, k: int):
    """Bit for bit, whatever order CTAs come in. gemv by splits; they share a cluster where one holds them."""
    if isinstance(schedule, int):
        spec = product(3, 33, k, out=F32)
        splits, schedule = schedule, scheduled(spec, 1, 1, 2, schedule)
        assert (TABLE.build(spec, schedule, GPU(arch)).cluster[1] > 1) == (arch == "sm_90a" and splits <= 8)
    else: spec = product(128, 128, k, BF16, F32)
    given, made = arguments(spec, integers=False), TABLE.build(spec, schedule, GPU(arch, 7))
    first, *others = (run(made, spec, given, arch, seed) for seed in range(5))
    assert all(torch.equal(first, other) for other in others)
