"""GPU templates of matmuls with 2:4 sparse matrices, against the reference of their specs: dtypes, extents
that no tile divides, epilogues, splits, and the same bits whenever copies arrive. What ptxas and the
emulator count: no spill, nothing that is serialised, no bank conflict, main loops without moves."""
from __future__ import annotations

from typing import Any

import pytest
from tinygrad.dtype import dtypes

from tests.support.tile.gemm_case import tensor_map
from tests.support.tile.reference_case import answer, bits, right, run, same
from tests.support.tile.sparse_case import BF16, E4M3, F16, F32, INT8, matmul, storages
from tinygrad_nv.errors import SpecError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.sass import disassemble, functions, main_loop
from tinygrad_nv.tile.arguments import with_scratch
from tinygrad_nv.tile.expression import Load, Sum
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.sparse_gemm.schedules import SparseMma, SparseWgmma
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

HOPPER, ADA, AMPERE = GPU("sm_90a", 132), GPU("sm_89", 142), GPU("sm_80", 108)
WGMMA = SparseWgmma().stages(3)
SMALL = WGMMA.block(64, 16).warps(8)
MMA = SparseMma().block(32, 32).k(64).warps(2, 2).stages(3)


def held(spec: SparseGemmSpec, schedule: Schedule, gpu: GPU, seed: int = 0, whole: bool = False) -> None:
    """Holds a kernel against the reference. Of fp8 tensor cores may cut 2^-10 of the magnitudes that are
    added up, as of dense matmuls (gemm_case.bounds)."""
    given = storages(spec, seed, whole)
    got = run(spec, schedule, gpu, given, seed)
    if whole or spec.gemm.a.dtype == INT8: same(spec, given, got)
    elif spec.gemm.a.dtype == E4M3:
        sizes = {name: one if name == "metadata" else one.double().abs().to(one.dtype)
                 for name, one in given.items()}
        exact, most = (answer(spec, each, exact=True)["out"] for each in (given, sizes))
        assert ((got["out"] - exact).abs() <= 2.0**-10 * most).all()
    else: right(spec, given, got, cut=2.0**-16)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [BF16, F16, E4M3, INT8], ids=str)
@pytest.mark.parametrize("whole", [True, False])
def test_wgmma_types(dtype: Any, whole: bool):
    """More stages than the ring has, tiles beyond both edges."""
    held(matmul(20, 152, 256 * 5 + 64, dtype), SMALL.k(256 // dtype.itemsize), HOPPER, whole=whole)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("gpu", "dtype"), [(AMPERE, BF16), (AMPERE, F16), (AMPERE, INT8), (ADA, E4M3),
                                            (HOPPER, BF16)], ids=str)
@pytest.mark.parametrize("whole", [True, False])
def test_mma_types(gpu: GPU, dtype: Any, whole: bool):
    held(matmul(40, 72, 640, dtype), MMA, gpu, whole=whole)


WIDE = [WGMMA.block(64, 8).warps(8), WGMMA.block(128, 64).warps(12).stages(4),
        WGMMA.block(256, 24).warps(12), WGMMA.block(128, 128).warps(12).pingpong(),
        WGMMA.block(64, 32).warps(8).split(2), WGMMA.block(128, 16).warps(12).split(4),
        WGMMA.block(192, 16).warps(16), WGMMA.block(64, 64).warps(8).k(192),
        WGMMA.block(128, 64).warps(12).k(64), WGMMA.block(64, 64).warps(8).k(64).cluster(2),
        WGMMA.block(128, 32).cluster(1, 2), WGMMA.block(128, 64).k(64).cluster(2, 2)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", WIDE, ids=str)
def test_wgmma_extents(schedule: SparseWgmma):
    held(matmul(70, 152, 1024, bias=True), schedule, HOPPER)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", [WIDE[1], WIDE[3].stages(2), WIDE[4], WIDE[6]], ids=str)
def test_wgmma_of_fp8(schedule: SparseWgmma):
    """Sums of 64 rows at a time go to float32."""
    held(matmul(70, 152, 1600, E4M3, bias=True), schedule.k(256).stages(2), HOPPER)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", [
    MMA.block(128, 64).warps(2, 2).stages(4), MMA.block(64, 128).warps(2, 2), MMA.block(32, 32).k(128),
    MMA.block(64, 16).warps(4, 1).split(3), MMA.block(16, 16).warps(1, 1).stages(2)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, INT8], ids=str)
def test_mma_extents(schedule: SparseMma, dtype: Any):
    """Tiles beyond both edges, splits that have unequal parts."""
    held(matmul(70, 152, 1280, dtype, bias=True), schedule, AMPERE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 64), (3, 7, 128), (65, 257, 192)])
def test_extents(m: int, n: int, k: int):
    held(matmul(m, n, k), SMALL, HOPPER)
    held(matmul(m, n, k), MMA, AMPERE)


@pytest.mark.slow
def test_columns_within_a_unit():
    """K that is no multiple of 64 is for wgmma, whose copies bring zeros beyond it."""
    held(matmul(9, 40, 80), SMALL, HOPPER)
    assert "not a multiple of block_k" in "; ".join(TABLE.problems(matmul(9, 40, 80), MMA, AMPERE))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("schedule", "gpu"), [(SMALL, HOPPER), (MMA, AMPERE)], ids=str)
def test_activations_along_rows(schedule: Schedule, gpu: GPU):
    """And a result that lies so, and rows apart."""
    held(matmul(24, 72, 256, along_m=True), schedule, gpu)
    held(matmul(24, 72, 256, gap=8), schedule, gpu)
    gemm = GemmSpec(24, 72, 256, Operand(BF16, 256, 1), Operand(BF16, 256, 1), Result(F32, 1, 24))
    held(SparseGemmSpec(gemm), schedule, gpu)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("schedule", "gpu"), [(SMALL, HOPPER), (MMA, AMPERE)], ids=str)
def test_an_epilogue(schedule: Schedule, gpu: GPU):
    added = (Sum() * Load(0, F32, 1, 0) + Load(1, BF16, 72, 1).cast(F32)).cast(BF16)
    held(matmul(24, 72, 512, epilogue=added), schedule, gpu)


@pytest.mark.parametrize(("schedule", "gpu"), [(SMALL, HOPPER), (MMA, AMPERE)], ids=str)
def test_the_same_bits_whenever_copies_arrive(schedule: Schedule, gpu: GPU):
    spec = matmul(20, 72, 1024)
    given = storages(spec)
    first, *others = (run(spec, schedule, gpu, given, seed)["out"] for seed in range(4))
    assert all((each == first).all() for each in others)


def test_a_schedule_is_chosen():
    for m, n, k in ((1, 4096, 4096), (16, 14336, 4096), (300, 4096, 14336), (4096, 4096, 4096)):
        for dtype, gpu, kind in ((BF16, HOPPER, SparseWgmma), (E4M3, HOPPER, SparseWgmma),
                                 (BF16, AMPERE, SparseMma), (E4M3, ADA, SparseMma)):
            spec = matmul(m, n, k, dtype)
            found = TABLE.choose(spec, gpu)
            assert isinstance(found, kind)
            assert TABLE.read("gpu", found.to_json()) == found


REFUSED = {"fp8 sums go to float32": (E4M3, WGMMA.block(128, 64).k(128)),
           "multiple of the unit's 64": (BF16, WGMMA.block(128, 64).k(96)),
           "stream-K": (BF16, WGMMA.block(128, 64).stream_k()),
           "shared memory": (BF16, WGMMA.block(128, 256).stages(4))}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_schedules(words: str):
    dtype, schedule = REFUSED[words]
    assert words in "; ".join(TABLE.problems(matmul(64, 256, 1024, dtype), schedule, HOPPER))


def test_refused_specs():
    with pytest.raises(SpecError, match="of float"): matmul(8, 8, 64, dtypes.float32)
    with pytest.raises(SpecError, match="multiple of 4"): matmul(8, 8, 66)
    assert "wgmma needs sm_90a" in TABLE.why_not(matmul(8, 8, 64, E4M3), AMPERE)


# **** what ptxas and the emulator count ****

@pytest.mark.sampled(9)
@pytest.mark.parametrize(("dtype", "gpu"), [(BF16, HOPPER), (E4M3, HOPPER), (INT8, HOPPER), (BF16, AMPERE),
                                            (INT8, AMPERE), (E4M3, ADA)],
                         ids=lambda each: str(getattr(each, "arch", each)))
@pytest.mark.parametrize("m", [1, 64, 2048])
def test_default_schedules_do_not_spill(dtype: Any, gpu: GPU, m: int):
    """`assemble` raises where ptxas says that it serialised wgmmas."""
    spec = matmul(m, 4096, 4096, dtype, BF16)
    schedule = TABLE.choose(spec, gpu)
    assert schedule is not None, TABLE.why_not(spec, gpu)
    made = TABLE.build(spec, schedule, gpu)
    found = assemble(made.ptx, gpu.arch).kernels[made.name]
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "schedule", "most"), [
    (BF16, SparseWgmma().block(128, 256).warps(12).k(64).stages(4), 30),
    (BF16, SparseWgmma().block(256, 128).warps(12).k(128).stages(2), 52)], ids=str)
def test_wgmmas_of_a_stage_stand_together(dtype: Any, schedule: SparseWgmma, most: int):
    """Beside wgmmas a stage has barriers, descriptors and a read of metadata for each 64 rows and columns.
    ptxas 13.0 makes 29 and 52 instructions."""
    made = TABLE.build(matmul(4096, 4096, 4096, dtype), schedule, HOPPER)
    loop = main_loop(functions(disassemble(assemble(made.ptx, "sm_90a").cubin))[made.name])
    assert loop is not None
    units, subtiles = schedule.block_k // 64, schedule.block_m // 128
    assert loop.tensor == 2 * units * subtiles
    assert loop.counts["LDS"] == units * subtiles
    assert loop.around - loop.tensor <= most


def test_operands_of_mma_are_not_moved():
    """Of 32 mma.sp, 16 reads of operands and 8 of metadata; ptxas 13.0 makes 68 others, 140 when two steps
    of activations had to be moved side by side."""
    schedule = SparseMma().block(128, 128).k(64).warps(2, 4).stages(4)
    made = TABLE.build(matmul(4096, 4096, 4096), schedule, AMPERE)
    loop = main_loop(functions(disassemble(assemble(made.ptx, "sm_80").cubin))[made.name])
    assert loop is not None
    assert (loop.tensor, loop.counts["LDSM"]) == (32, 16)
    assert loop.around - loop.tensor <= 70


@pytest.mark.parametrize(("spec", "schedule", "gpu"), [
    (matmul(64, 128, 512), SparseWgmma().block(64, 64).warps(8).stages(3), HOPPER),
    (matmul(64, 128, 512, E4M3), SparseWgmma().block(128, 64).warps(12).k(256).stages(2), HOPPER),
    (matmul(64, 128, 512), SparseMma().block(64, 64).k(64).warps(2, 2), AMPERE),
    (matmul(64, 128, 512, along_m=True), SparseMma().block(64, 64).k(64).warps(2, 2), AMPERE),
    (matmul(64, 128, 512, INT8), SparseMma().block(64, 64).k(128).warps(2, 2), AMPERE)],
    ids=lambda each: str(getattr(each, "arch", each))[:40])
def test_main_loops_have_no_bank_conflict(spec: SparseGemmSpec, schedule: Schedule, gpu: GPU):
    made, emu = TABLE.build(spec, schedule, gpu), Emulator(gpu.arch)
    given = storages(spec)
    buffers = [emu.alloc(bits(given[each.name])) for each in TABLE.arguments(spec)]
    order = with_scratch(made, buffers, TABLE.arguments(spec), lambda some: emu.alloc(some.nbytes))
    maps = [tensor_map(order, one, 0) for one in made.launch.maps]
    report = emu.launch(made.ptx, made.grid, made.threads, [*order, *maps], dynamic_smem=made.dynamic_smem,
                        cluster=made.cluster)
    assert report.findings == []
    lines = made.ptx.splitlines()
    assert {lines[line - 1].split()[0] for line in report.stats.bank_conflicts} == set()
