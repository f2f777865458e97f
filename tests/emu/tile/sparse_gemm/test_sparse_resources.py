"""What ptxas and the emulator count of kernels of matmuls with 2:4 sparse matrices: no spill, nothing that is
serialised, no bank conflict, and main loops without moves between operands."""
from __future__ import annotations

from typing import Any

import pytest

from tests.support.tile.gemm_case import tensor_map
from tests.support.tile.reference_case import bits
from tests.support.tile.sparse_case import BF16, E4M3, INT8, matmul, storages
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.sass import disassemble, functions, main_loop
from tinygrad_nv.tile.arguments import with_scratch
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.sparse_gemm.schedules import SparseMma, SparseWgmma
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

HOPPER, ADA, AMPERE = GPU("sm_90a", 132), GPU("sm_89", 142), GPU("sm_80", 108)


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
