"""The mma.sync template on the emulator: any extents, majors, strides, alignments, batches, schedules."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gemm_case import GUARD, arguments, launched, near, operand, product, reference, result, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.tile.expression import Load, Sum, relu
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Mma
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.layout import SharedTile
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F16, BF16, F32 = dtypes.float16, dtypes.bfloat16, dtypes.float32
SMALL = Mma().block(64, 64).k(32).warps(2, 2).stages(3)
MAJORS = ["KK", "KM", "MK", "MM"]


def scheduled(m: int, n: int, k: int, warps_m: int, warps_n: int, depth: int) -> GemmSchedule:
    return Mma().block(m, n).k(k).warps(warps_m, warps_n).stages(depth)


def exactly(spec: GemmSpec, schedule: GemmSchedule, arch: str = "sm_80", seed: int = 0) -> None:
    """Asserts that integer operands come out exactly."""
    given = arguments(spec, seed)
    got = run(TABLE.build(spec, schedule, GPU(arch)), spec, given, arch, seed)
    assert torch.equal(got, reference(spec, given))


BLOCK, WARPS = st.sampled_from([32, 64, 128]), st.sampled_from([1, 2])
SCHEDULES = st.builds(scheduled, BLOCK, BLOCK, st.sampled_from([16, 32, 64]), WARPS, WARPS, st.integers(2, 4))
EXTENT = st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 128, 136, 200]))
GAP = st.sampled_from([0, 0, 1, 2, 4, 8])


@st.composite
def batched_operands(draw: st.DrawFn, dtype: DType, mn: int, k: int, batch: tuple[int, ...]) -> Operand:
    """Any major, gap and offset; the same for all of some dimensions of the batch."""
    made = operand(dtype, mn, k, draw(st.sampled_from(["K", "MN"])), draw(GAP), batch, draw(GAP))
    strides = tuple(0 if draw(st.booleans()) and draw(st.booleans()) else stride for stride in made.batch)
    return replace(made, batch=strides)


@st.composite
def specs(draw: st.DrawFn) -> GemmSpec:
    """Products of 16-bit floats into float32."""
    m, n = draw(EXTENT), draw(EXTENT)
    k, dtype = draw(st.one_of(EXTENT, st.integers(150, 330))), draw(st.sampled_from([F16, BF16]))
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=3 if m * n * k < 200_000 else 0)))
    a, b = (draw(batched_operands(dtype, mn, k, batch)) for mn in (m, n))
    out = result(F32, m, n, draw(st.sampled_from(["N", "N", "M"])), draw(GAP), batch)
    return GemmSpec(m, n, k, a, b, replace(out, offset=draw(GAP)), batch)


@settings(max_examples=50, deadline=None)
@given(specs(), SCHEDULES, st.integers(0, 3))
def test_integers_come_out_exactly(spec: GemmSpec, schedule: GemmSchedule, seed: int):
    exactly(spec, SMALL if TABLE.problems(spec, schedule, GPU("sm_80")) else schedule, seed=seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_rings_go_round(depth: int, seed: int):
    """Seven tiles along K in a ring of 2 to 4, copies late and early."""
    exactly(product(70, 40, 7 * 32, BF16, F32), SMALL.stages(depth), seed=seed)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("out", [F16, BF16, F32])
def test_random_values_are_as_near_as_a_float32_sum(dtype: DType, out: DType):
    spec = product(70, 90, 520, dtype, out)
    given = arguments(spec, integers=False)
    # the exact sum is rounded too: where it lies between two results, both are right
    near(spec, given, run(TABLE.build(spec, SMALL, GPU("sm_80")), spec, given), extra=1)


@pytest.mark.parametrize("out", [F16, F32])
@pytest.mark.parametrize(("m_stride", "n_stride", "offset"),
                         [(1, 77, 0), (123, 3, 1), (2, 200, 5), (41, 1, 3)])
def test_results_with_any_strides(m_stride: int, n_stride: int, offset: int, out: DType):
    spec = product(70, 40, 96, F16, out)
    exactly(replace(spec, out=Result(out, m_stride, n_stride, (), offset)), SMALL)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 150])
def test_rows_are_known_at_launch(rows: int):
    """Only the first rows of the result are written, only those of A are read."""
    spec = product(150, 40, 160, BF16, F32, symbolic=True)
    given = arguments(spec)
    want = reference(spec, given)[:rows]
    given["a"][rows * spec.k:] = torch.nan
    got = run(TABLE.build(spec, SMALL, GPU("sm_80")), spec, given, m=rows)
    assert torch.equal(got, want)


def test_a_bias_and_a_residual_are_added_where_the_element_is():
    column, rest = Load(0, BF16, 0, 1, (3,)), Load(1, BF16, 41, 1, (33 * 41,), 2)
    ends = relu(Sum().cast(BF16) + column) + rest
    exactly(product(33, 41, 64, BF16, batch=(2,), epilogue=ends), SMALL)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize("majors", MAJORS)
def test_the_default_schedule_neither_spills_nor_meets_bank_conflicts(arch: str, majors: str):
    spec = product(256, 256, 256, BF16, majors=majors)
    made = TABLE.build(spec, Mma(), GPU(arch))
    resources = assemble(made.ptx, arch).kernels[made.name]
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)
    given = arguments(spec)
    storage, report = launched(made, spec, given, arch)
    assert report.findings == []
    assert report.stats.bank_conflicts == {}
    assert set(report.stats.sectors_per_request.values()) == {16.0}  # 16 bytes a thread, all of each sector
    assert report.stats.tensor_flops == spec.flops
    assert torch.equal(storage.double().view(256, 256), reference(spec, given))


def test_what_lies_beside_the_result_would_be_seen():
    """The harness itself: a storage larger than the result starts and ends as GUARD."""
    spec = replace(product(8, 8, 16, F16, F32), out=Result(F32, 11, 1))
    storage, _ = launched(TABLE.build(spec, SMALL, GPU("sm_80")), spec, arguments(spec), "sm_80")
    assert (storage.view(-1)[8:11] == GUARD).all()


@pytest.mark.parametrize(("rows", "row_bytes"), [(16, 32), (32, 64), (64, 128), (32, 256), (8, 384)])
def test_a_tile_is_a_permutation_in_which_eight_rows_have_eight_places(rows: int, row_bytes: int):
    tile = SharedTile(rows, row_bytes)
    places = [tile.offset(row, byte) for row in range(rows) for byte in range(0, row_bytes, 16)]
    assert sorted(places) == list(range(0, tile.nbytes, 16))
    for row in range(0, rows, 8):
        for byte in range(0, row_bytes, 16):
            banks = {tile.offset(row + i, byte) // 16 % 8 for i in range(8)}
            assert len(banks) == 8


@pytest.mark.parametrize(("schedule", "words"), [
    (Mma().block(100, 128), ["block_m=100 is not a multiple of 2 warps × 16 = 32"]),
    (Mma().k(48), ["block_k=48"]), (Mma().stages(1), ["1 stages"]),
    (Mma().warps(8, 8), ["2048 threads"]), (Mma().warps(0, 2), ["extents below 1"]),
    (Mma().block(192, 128).warps(4, 2), ["block_m=192 / 4 warps × 2 B = 96 B neither divide 128"]),
    (Mma().block(256, 256), ["256 × 256 / 128 threads = 512 sums a thread"]),
    (Mma().block(96, 96).warps(3, 1), ["3x1 warps are 96 threads, not a power of 2"]),
    (Mma().split(3), ["3 splits of 64 / 32 = 2 steps"]),
    (Mma().k(128).stages(4), ["4 stages × (128 + 128) × 128 × 2 B = 262144 B", "166912"]),
])
def test_impossible_schedules_are_refused_with_the_arithmetic(schedule: GemmSchedule, words: list[str]):
    spec = product(64, 64, 64, F16, majors="MK")
    with pytest.raises(ScheduleError) as error: TABLE.build(spec, schedule, GPU("sm_80"))
    assert [word for word in words if word not in str(error.value)] == []
