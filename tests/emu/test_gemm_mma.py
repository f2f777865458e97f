"""The mma.sync template on the emulator: any extents, majors, strides, alignments, schedules, epilogues."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import ScheduleError, SpecError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.tile.layout import SharedTile
from tinygrad_nv.tile.schedule import Schedule, problems
from tinygrad_nv.tile.spec import Epilogue, GemmSpec, Operand
from tinygrad_nv.tile.templates.gemm_mma import gemm_mma

TORCH = {dtypes.float16: torch.float16, dtypes.bfloat16: torch.bfloat16, dtypes.float32: torch.float32}
SMALL = Schedule().block(64, 64).k(32).warps(2, 2).stages(3)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bytes, in its order in memory."""
    return np.frombuffer(tensor.contiguous().view(torch.uint8).numpy().tobytes(), np.uint8)


def run(spec: GemmSpec, schedule: Schedule, a: torch.Tensor, b: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None, arch: str = "sm_80", seed: int = 0) -> torch.Tensor:
    """The product of storages `a` and `b`, whose strides the spec knows; no finding is allowed."""
    made = gemm_mma(spec, schedule, arch)
    emu = Emulator(arch, seed=seed)
    rows = spec.m if spec.batch == 1 else spec.batch * spec.m
    start = torch.full((rows, spec.rows), 77, dtype=TORCH[spec.out])
    out = emu.alloc(bits(start))
    args = [out, *(emu.alloc(bits(t)) for t in (a, b, bias, residual) if t is not None)]
    report = emu.launch(made.ptx, made.grid, made.threads, args, dynamic_smem=made.dynamic_smem)
    assert report.findings == [], "\n".join(map(str, report.findings))
    got = torch.frombuffer(bytearray(out.numpy().tobytes()), dtype=TORCH[spec.out]).view(spec.batch, spec.m,
                                                                                         spec.rows)
    assert (got[:, :, spec.n:] == 77).all(), "elements between the rows were written"
    return got[:, :, :spec.n]


def operand(dtype: DType, batch: int, mn: int, k: int, major: str, gap: int) -> tuple[Operand,
                                                                                      tuple[int, ...]]:
    """A matrix with `gap` elements after each row, and the shape of its storage."""
    if major == "K": return Operand(dtype, k + gap, 1, mn * (k + gap)), (batch, mn, k + gap)
    return Operand(dtype, 1, mn + gap, k * (mn + gap)), (batch, k, mn + gap)


def matrix(storage: torch.Tensor, mn: int, k: int, major: str) -> torch.Tensor:
    """[batch, mn, k] in float64."""
    view = storage.double() if major == "K" else storage.double().transpose(1, 2)
    return view[:, :mn, :k]


EXTENT = st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 128, 136, 200]))
def scheduled(m: int, n: int, k: int, warps_m: int, warps_n: int, depth: int) -> Schedule:
    return Schedule().block(m, n).k(k).warps(warps_m, warps_n).stages(depth)


BLOCK, WARPS = st.sampled_from([32, 64, 128]), st.sampled_from([1, 2])
SCHEDULES = st.builds(scheduled, BLOCK, BLOCK, st.sampled_from([16, 32, 64]), WARPS, WARPS, st.integers(2, 4))


@settings(max_examples=60, deadline=None)
@given(EXTENT, EXTENT, st.one_of(EXTENT, st.integers(150, 330)), st.sampled_from([1, 1, 2, 3]),
       st.sampled_from(["K", "MN"]),
       st.sampled_from(["K", "MN"]), st.sampled_from([0, 0, 1, 2, 4, 8]), st.sampled_from(list(TORCH)[:2]),
       SCHEDULES, st.integers(0, 3))
def test_integers_come_out_exactly(m: int, n: int, k: int, batch: int, major_a: str, major_b: str, gap: int,
                                   dtype: DType, schedule: Schedule, seed: int):
    a_is, a_shape = operand(dtype, batch, m, k, major_a, gap)
    b_is, b_shape = operand(dtype, batch, n, k, major_b, gap)
    spec = GemmSpec(m, n, k, a_is, b_is, dtypes.float32, n + gap, batch, m * (n + gap))
    if problems(schedule, spec, "sm_80"): schedule = SMALL
    random = torch.Generator().manual_seed(m * 7919 + n * 31 + k)
    # what lies between rows is NaN: nothing may read it into a sum
    a, b = (torch.full(shape, torch.nan, dtype=TORCH[dtype]) for shape in (a_shape, b_shape))
    for t, mn, major in ((a, m, major_a), (b, n, major_b)):
        inner, outer = (k, mn) if major == "K" else (mn, k)
        t[:, :outer, :inner] = torch.randint(-4, 5, (batch, outer, inner), generator=random).to(TORCH[dtype])
    got = run(spec, schedule, a, b, seed=seed)
    want = matrix(a, m, k, major_a) @ matrix(b, n, k, major_b).transpose(1, 2)
    assert torch.equal(got.double(), want)


@pytest.mark.parametrize("dtype", list(TORCH)[:2])
@pytest.mark.parametrize("out", list(TORCH))
def test_random_values_are_as_near_as_a_float32_sum(dtype: DType, out: DType):
    """Error ≤ 3 × that of float32 accumulation by torch, plus the rounding of the result; and, since tensor
    cores of sm_80 cut each sum of 8 products at 24 bits below its largest term, 2^-23 of that for each of
    them."""
    m, n, k = 70, 90, 520
    a, b = torch.rand(1, m, k).to(TORCH[dtype]) - 0.5, torch.rand(1, n, k).to(TORCH[dtype]) - 0.5
    spec = GemmSpec(m, n, k, Operand(dtype, k, 1), Operand(dtype, k, 1), out, n)
    got = run(spec, SMALL, a, b).double()
    exact = a.double() @ b.double().transpose(1, 2)
    plain = (a.float() @ b.float().transpose(1, 2)).double()
    unit = {dtypes.float32: 0.0, dtypes.float16: 2**-11, dtypes.bfloat16: 2**-8}[out]
    cut = k / 8 * 2**-23 * exact.abs().max()
    assert ((got - exact).abs() <= 3 * (plain - exact).abs().max() + unit * exact.abs() + cut).all()


def activation(name: str, x: torch.Tensor) -> torch.Tensor:
    """The reference, in float64."""
    if name == "relu": return x.relu()
    if name == "silu": return torch.nn.functional.silu(x)
    if name == "gelu_tanh": return torch.nn.functional.gelu(x, approximate="tanh")
    return x * (1.702 * x).sigmoid() if name == "quick_gelu" else x


@pytest.mark.parametrize("name", ["", "relu", "silu", "gelu_tanh", "quick_gelu"])
@pytest.mark.parametrize("bias", ["", "row", "column"])
@pytest.mark.parametrize("residual", [False, True])
def test_epilogues(name: str, bias: str, residual: bool):
    """ex2.approx is good to 2 ulp of float32; the result is rounded to bfloat16."""
    m, n, k = 33, 41, 64
    a, b = (torch.randint(-3, 4, (1, x, k)).bfloat16() for x in (m, n))
    beside = (torch.rand(m if bias == "row" else n) - 0.5).bfloat16() if bias else None
    rest = (torch.rand(1, m, n) - 0.5).bfloat16() if residual else None
    ends = Epilogue(0.125, bias, name, residual)  # type: ignore[arg-type]
    spec = GemmSpec(m, n, k, Operand(dtypes.bfloat16, k, 1), Operand(dtypes.bfloat16, k, 1), dtypes.bfloat16,
                    n,
                    epilogue=ends)
    got = run(spec, SMALL, a, b, beside, rest).double()
    want = a.double() @ b.double().transpose(1, 2) * 0.125
    if beside is not None: want = want + (beside.double()[:, None] if bias == "row" else beside.double())
    want = activation(name, want) + (rest.double() if rest is not None else 0)
    assert ((got - want).abs() <= 2**-8 * want.abs() + 2**-18).all()


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize("majors", [("K", "K"), ("K", "MN"), ("MN", "K"), ("MN", "MN")])
def test_the_default_schedule_neither_spills_nor_meets_bank_conflicts(arch: str, majors: tuple[str, str]):
    m = n = k = 256
    (a_is, _), (b_is, _) = (operand(dtypes.bfloat16, 1, 256, k, major, 0) for major in majors)
    spec = GemmSpec(m, n, k, a_is, b_is, dtypes.bfloat16, n)
    made = gemm_mma(spec, Schedule(), arch)
    resources = assemble(made.ptx, arch).kernels[made.name]
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)
    emu = Emulator(arch)
    args = [emu.alloc(np.zeros(2 * m * n, np.uint8)) for _ in range(3)]
    report = emu.launch(made.ptx, made.grid, made.threads, args, dynamic_smem=made.dynamic_smem)
    assert report.findings == []
    assert report.stats.bank_conflicts == {}
    assert report.stats.tensor_flops == spec.flops


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
    (Schedule().block(100, 128), ["block_m=100 is not a multiple of 2 warps × 16 = 32"]),
    (Schedule().k(48), ["block_k=48"]), (Schedule().stages(1), ["1 stages"]),
    (Schedule().warps(8, 8), ["2048 threads"]), (Schedule().warps(0, 2), ["extents below 1"]),
    (Schedule().block(192, 128).warps(4, 2), ["block_m=192 / 4 warps × 2 B = 96 B neither divide 128"]),
    (Schedule().block(256, 256), ["256 × 256 / 128 threads = 512 sums a thread"]),
    (Schedule().k(128).stages(4), ["4 stages × (128 + 128) × 128 × 2 B = 262144 B", "166912"]),
])
def test_impossible_schedules_are_refused_with_the_arithmetic(schedule: Schedule, words: list[str]):
    spec = GemmSpec(64, 64, 64, Operand(dtypes.float16, 64, 1), Operand(dtypes.float16, 64, 1),
                    dtypes.float16, 64)
    with pytest.raises(ScheduleError) as error: gemm_mma(spec, schedule)
    assert [word for word in words if word not in str(error.value)] == []


def test_impossible_specs_are_refused():
    half = Operand(dtypes.float16, 64, 1)
    with pytest.raises(SpecError, match="m=0"): GemmSpec(0, 64, 64, half, half, dtypes.float16, 64)
    with pytest.raises(SpecError, match="rows of the result"): GemmSpec(8, 64, 64, half, half,
                                                                        dtypes.float16, 32)
    with pytest.raises(SpecError, match="one dtype"):
        GemmSpec(8, 64, 64, half, Operand(dtypes.bfloat16, 64, 1), dtypes.float16, 64)
