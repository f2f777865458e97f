"""The wgmma template on the emulator, property by property: rings that go round, turns, clusters, edges,
dtypes, parts, rows known at launch, random values against float64."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gemm_case import arguments, near, operand, product, reference, result, run
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.expression import Load, Sum, silu
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BF16, F16, F32, E4M3, E5M2 = (dtypes.bfloat16, dtypes.float16, dtypes.float32, dtypes.fp8e4m3, dtypes.fp8e5m2)
W = Wgmma()
SMALL = W.block(128, 64)


def exactly(spec: GemmSpec, schedule: GemmSchedule, sm_count: int = 132, seed: int = 0,
            m: int | None = None) -> None:
    """Asserts that integer operands come out exactly."""
    given = arguments(spec, seed)
    got = run(TABLE.build(spec, schedule, GPU("sm_90a", sm_count)), spec, given, "sm_90a", seed, m)
    assert torch.equal(got, reference(spec, given)[..., :m, :])


def gate(m: int, n: int, k: int, dtype: DType = BF16, major: str = "K", **more: bool) -> GemmSpec:
    """silu(x @ g) * (x @ u) of one weight, whose halves are rows (K-major) or columns apart."""
    b = operand(dtype, 2 * n, k, major)
    gated = silu(Sum().cast(dtype)) * Sum(F32, 1).cast(dtype)
    return GemmSpec(m, n, k, operand(dtype, m, k), b, result(dtype, m, n), (), gated, 2,
                    n * k if major == "K" else n, **more)


# **** rings, turns, clusters ****

@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stages", [2, 3, 4, 7])
def test_rings_go_round(stages: int, seed: int):
    """More iterations than stages, in one tile and over the tiles of a persistent CTA; copies late and
    early."""
    exactly(product(200, 130, 64 * (stages + 2), BF16, F32), SMALL.stages(stages), 2, seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("warps", "k"), [(12, 5), (12, 8), (16, 7)])
def test_consumers_take_turns(warps: int, k: int, seed: int):
    """Two and three consumers, an odd and an even number of rounds of the ring between one's turns."""
    exactly(product(500, 130, 64 * k, BF16, F32), W.block(64, 64).warps(warps).stages(3).pingpong(), 2, seed)


def test_turns_of_fewer_tiles_than_consumers():
    exactly(product(50, 30, 64 * 6), W.block(64, 32).warps(16).pingpong(), 1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("cluster_m", "cluster_n"), [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2)])
@pytest.mark.parametrize("pingpong", [False, True])
def test_clusters_share_operands(cluster_m: int, cluster_n: int, pingpong: bool, seed: int):
    """Tiles at the edge of the result and clusters that reach beyond it, two tiles a CTA."""
    s = SMALL.stages(3).cluster(cluster_m, cluster_n)
    spec = product(304, 200, 64 * 5, BF16, F32, "MM" if seed % 2 else "KK")
    exactly(spec, s.pingpong() if pingpong else s, 8, seed)


@pytest.mark.parametrize("clusters", [1, 2, 3])
def test_fewer_clusters_have_more_tiles_each(clusters: int):
    """8 tiles of a cluster, of which the GPU holds so many at once."""
    spec, s = product(1000, 200, 64 * 5, BF16, F32), SMALL.stages(3).cluster(2, 2)
    given, made = arguments(spec), TABLE.build(spec, s, GPU("sm_90a", clusters=((4, clusters),)))
    assert made.grid == (4 * clusters, 1, 1)
    assert torch.equal(run(made, spec, given, "sm_90a"), reference(spec, given))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("splits", [2, 4, 8])
def test_clusters_share_sums(splits: int, seed: int):
    """Parts of unequal length, each longer than the ring; 8 splits have fewer panels of columns than CTAs."""
    spec = product(200, 200, 64 * (5 * splits + 3), BF16, F32)
    exactly(spec, W.block(128, 128).stages(3).split(splits), seed=seed)


@pytest.mark.parametrize("m", [1, 128, 200])
def test_clusters_that_share_sums_are_as_many_as_tiles(m: int):
    exactly(product(200, 72, 64 * 9, BF16, F32, batch=(2,), symbolic=True), SMALL.split(2), m=m)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sm_count", [1, 2, 5, 9, 16])
def test_persistent_ctas_share_all_stages(sm_count: int, seed: int):
    """4 tiles of 11 stages: CTAs with several tiles, with the end of one and the beginning of another, and
    tiles of five CTAs."""
    exactly(product(200, 130, 64 * 11, BF16, F32), W.block(128, 72).stages(3).streamed(), sm_count, seed)


@pytest.mark.parametrize("m", [1, 128, 300])
def test_stages_to_share_are_known_at_launch(m: int):
    exactly(product(300, 72, 64 * 7, BF16, F32, batch=(2,), symbolic=True), SMALL.streamed(), 5, m=m)


@pytest.mark.parametrize("schedule", [W.block(128, 128).split(4), SMALL.streamed()])
def test_shared_sums_are_the_same_every_time(schedule: GemmSchedule):
    """Bit for bit, whatever order CTAs come in."""
    spec = product(128, 128, 64 * 21, BF16, F32)
    given, made = arguments(spec, integers=False), TABLE.build(spec, schedule, GPU("sm_90a", 7))
    first, *others = (run(made, spec, given, "sm_90a", seed) for seed in range(6))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("m", [640, 600, 60])
def test_every_tile_is_walked_once(m: int, group: int):
    exactly(product(m, 72, 64, BF16, F32, batch=(2,)), W.block(128, 16).grouped(group), 3)


# **** tiles ****

@pytest.mark.parametrize("columns", [8, 24, 40, 72, 104, 136, 168, 200, 232, 256])
@pytest.mark.parametrize("majors", ["KK", "MM"])
def test_every_width_of_a_tile(columns: int, majors: str):
    exactly(product(136, columns + 16, 136, BF16, F32, majors), W.block(128, columns).stages(2), 4)


@pytest.mark.parametrize(("rows", "warps"), [(64, 8), (128, 8), (192, 8), (128, 12), (256, 12), (192, 16)])
def test_every_height_of_a_tile(rows: int, warps: int):
    exactly(product(rows + 70, 40, 64 * 5, BF16, F32), W.block(rows, 32).warps(warps), 2)


@pytest.mark.parametrize("swizzle", ["32B", "64B", "128B"])
@pytest.mark.parametrize("majors", ["KK", "KM", "MK", "MM"])
def test_every_swizzle(swizzle: str, majors: str):
    exactly(product(136, 136, 64 * 5, F16, F32, majors), W.block(128, 128).stages(3).swizzle(swizzle))


@pytest.mark.parametrize("k", [32, 64, 128, 256])
@pytest.mark.parametrize(("a", "b"), [(E4M3, E4M3), (E5M2, E4M3), (dtypes.int8, dtypes.uint8),
                                      (dtypes.uint8, dtypes.uint8), (F32, F32)])
def test_every_dtype(a: DType, b: DType, k: int):
    """Rows of 32 to 256 bytes: swizzles of every width, several boxes side by side, promotion by parts."""
    spec = product(136, 72, 6 * k // a.itemsize + 16, a, dtypes.int32 if dtypes.is_int(a) else F32)
    exactly(replace(spec, b=replace(spec.b, dtype=b)), W.block(128, 64).k(k // a.itemsize).stages(3), 2)


# **** parts, rows known at launch, transposed products ****

@pytest.mark.parametrize(("schedule", "major"), [
    (W.block(128, 128), "K"), (W.block(128, 128), "MN"), (W.block(128, 96).cluster(2, 2), "K"),
    (W.block(128, 64).pingpong(), "MN"), (W.block(64, 16).warps(8), "K")])
def test_gates_meet_in_the_epilogue(schedule: GemmSchedule, major: str):
    spec = gate(200, 96, 64 * 6, major=major)
    given = arguments(spec, integers=False)
    near(spec, given, run(TABLE.build(spec, schedule, GPU("sm_90a", 4)), spec, given, "sm_90a"), extra=12)


@pytest.mark.parametrize("m", [1, 64, 128, 129, 304])
@pytest.mark.parametrize("major", ["K", "M"])
def test_rows_known_at_launch(m: int, major: str):
    """One kernel; rows beyond are neither read nor written."""
    spec = product(304, 72, 64 * 6, BF16, F32, major + "K", batch=(2,), symbolic=True)
    exactly(spec, SMALL.stages(3), 3, m=m)


def test_transposed_products_have_few_rows():
    spec = product(20, 200, 64 * 6, BF16, F32, epilogue=Sum() + Load(0, F32, 0, 1) + Load(1, F32, 1, 0))
    exactly(spec, W.block(128, 24).swapped(), 2)


def test_one_row_or_column_needs_no_pitch():
    """A pitch of 6 bytes between rows that are not there."""
    spec = product(1, 1, 40)
    exactly(replace(spec, a=replace(spec.a, mn=3), b=replace(spec.b, mn=3)), SMALL)


# **** random values ****

@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("out", [F16, BF16, F32])
def test_random_values_are_as_near_as_a_float32_sum(dtype: DType, out: DType):
    spec = product(70, 90, 520, dtype, out)
    given = arguments(spec, integers=False)
    got = run(TABLE.build(spec, SMALL, GPU("sm_90a")), spec, given, "sm_90a")
    near(spec, given, got, extra=1)  # a sum may lie between two results and go to either


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_fp8_sums_are_promoted(dtype: DType):
    """Sums of 4096 products, all positive, to 4 roundings of the tensor core's 13 bits, each of at most 33
    terms: without promotion every instruction would lose as much of the whole sum."""
    spec = product(70, 40, 4096, dtype, F32)
    given = arguments(spec, integers=False)
    given = {name: storage.float().abs().to(storage.dtype) for name, storage in given.items()}
    got = run(TABLE.build(spec, SMALL.k(128), GPU("sm_90a")), spec, given, "sm_90a")
    exact = reference(spec, given)
    assert ((got - exact).abs() <= 2.0**-10 * exact).all()


def test_tf32_cuts_operands_to_ten_bits():
    """Each operand loses less than 2^-10 of itself."""
    spec = product(70, 40, 320, F32)
    given = arguments(spec, integers=False)
    got = run(TABLE.build(spec, SMALL.k(32), GPU("sm_90a")), spec, given, "sm_90a")
    exact = reference(spec, given)
    most = reference(spec, {name: storage.abs() for name, storage in given.items()})
    assert ((got - exact).abs() <= 2.0**-9 * most).all()
