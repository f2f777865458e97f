"""What ptxas and the emulator count of kernels of matmuls with quantised matrices: registers, no spill, no
bank conflict, instructions for each weight that becomes an operand."""
from __future__ import annotations

import pytest
from tinygrad.dtype import DType

from tests.support.tile.gemm_case import tensor_map
from tests.support.tile.quant_case import BF16, F16, TYPES, matmul, storages
from tests.support.tile.reference_case import bits
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.ptx.sass import disassemble, functions, main_loop
from tinygrad_nv.quant.types import QType
from tinygrad_nv.tile.arguments import with_scratch
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.quant_gemm.schedules import QuantGemv, QuantMma, QuantWgmma
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

HOPPER, AMPERE = GPU("sm_90a", 132), GPU("sm_80", 108)
WGMMA, MMA = QuantWgmma().k(64), QuantMma().k(64)
WIDE = WGMMA.block(128, 256).warps(12).stages(4)
COMMON = ("int4 g128", "awq g32", "int8 channel", "e4m3 g128", "MXFP4", "NF4", "Q4_K", "Q6_K")


def unspilt(made: GemmKernel, arch: str) -> int:
    """Registers of a kernel, of which none is spilt; raises where ptxas serialised or ignored anything."""
    found = assemble(made.ptx, arch).kernels[made.name]
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    return found.registers


def launched(spec: QuantGemmSpec, made: GemmKernel, arch: str) -> Report:
    """A launch on the emulator."""
    emu, places, given = Emulator(arch), TABLE.arguments(spec), storages(spec)
    buffers = [emu.alloc(bits(given[each.name])) for each in places]
    order = with_scratch(made, buffers, places, lambda some: emu.alloc(some.nbytes))
    maps = [tensor_map(order, one, 0) for one in made.launch.maps]
    for zero in made.launch.zeroed: order[zero.pointer].data[:zero.nbytes] = 0
    return emu.launch(made.ptx, made.grid, made.threads, [*order, *maps],
                      dynamic_smem=made.dynamic_smem, cluster=made.cluster)


# bytes that are stored and loaded, and the stack's, of kernels of sm_80 that spill a few registers
KNOWN_SPILLS = {("MXFP4", 16): (4, 4, 8), ("MXFP6", 16): (18, 12, 16)}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in COMMON else pytest.mark.slow) for name in TYPES])
@pytest.mark.parametrize("m", [1, 8, 16, 2048])
def test_default_schedules_do_not_spill(name: str, m: int):
    """Of both architectures; on Hopper none is serialised either."""
    for gpu in (HOPPER, AMPERE):
        spec = matmul(TYPES[name], m, 4096, 4096)
        schedule = TABLE.choose(spec, gpu)
        assert schedule is not None, TABLE.why_not(spec, gpu)
        made = TABLE.build(spec, schedule, gpu)
        if gpu == AMPERE and (known := KNOWN_SPILLS.get((name, m))):
            found = assemble(made.ptx, gpu.arch).kernels[made.name]
            assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == known
        else: unspilt(made, gpu.arch)


@pytest.mark.parametrize(("spec", "schedule", "gpu"), [
    (matmul(TYPES["int4 g128"], 1, 64, 1024), QuantGemv().of(2, 2), HOPPER),
    (matmul(TYPES["int8 channel"], 8, 64, 1024), QuantGemv().of(2, 2), AMPERE),
    (matmul(TYPES["int4 g128"], 64, 128, 512), WGMMA.block(64, 64).warps(8).k(128), HOPPER),
    (matmul(TYPES["int8 g64"], 64, 128, 512), WGMMA.block(128, 64).warps(12), HOPPER),
    (matmul(TYPES["int4 g128"], 64, 128, 512), MMA.block(64, 64).warps(2, 2), AMPERE),
    (matmul(TYPES["NF4"], 64, 128, 480), MMA.block(64, 64).warps(2, 2), AMPERE),
    (matmul(TYPES["Q4_K"], 64, 128, 512), MMA.block(64, 128).warps(1, 4), AMPERE)],
    ids=lambda each: str(getattr(each, "arch", each))[:40])
def test_main_loops_have_no_bank_conflict(spec: QuantGemmSpec, schedule: QuantGemv | QuantWgmma | QuantMma,
                                          gpu: GPU):
    made = TABLE.build(spec, schedule, gpu)
    report = launched(spec, made, gpu.arch)
    assert report.findings == []
    lines = made.ptx.splitlines()
    where = {lines[line - 1].split()[0]: count for line, count in report.stats.bank_conflicts.items()}
    # what is left is of sums that warps of a gemv leave each other, once
    assert set(where) <= ({"st.shared.b32"} if isinstance(schedule, QuantGemv) else set()), where


def per_weight(type: QType, dtype: DType, m: int, schedule: QuantGemv | QuantWgmma, weights: int) -> float:
    """Instructions of the main loop that are not of tensor cores, for each of `weights` of a thread."""
    made = TABLE.build(matmul(type, m, 4096, 4096, dtype), schedule, HOPPER)
    loop = main_loop(functions(disassemble(assemble(made.ptx, HOPPER.arch).cubin))[made.name])
    assert loop is not None
    return (loop.around - loop.tensor) / weights


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "dtype", "m", "schedule", "weights", "most"), [
    ("int4 g128", BF16, 2048, WIDE, 32, 3.5), ("int4 g128", F16, 2048, WIDE, 32, 3.25),
    ("int8 channel", BF16, 2048, WIDE, 32, 3.1), ("int4 g128", BF16, 1, QuantGemv().of(1, 2), 64, 2.0),
    ("int4 g128", F16, 1, QuantGemv().of(1, 2), 64, 1.75), ("NF4", BF16, 2048, WIDE, 32, 6.0),
    ("NF4", BF16, 1, QuantGemv().of(1, 2), 64, 4.5)], ids=str)
def test_instructions_for_each_weight(name: str, dtype: DType, m: int, schedule: QuantGemv | QuantWgmma,
                                      weights: int, most: float):
    """The wgmma loop of 128 x 256 has 64 x 64 weights of each warpgroup, 32 a thread and stage; a gemv's of
    two units 64. bfloat16 takes 11 instructions for 8 integers of 4 bits and 4 to scale them, float16, which
    reads every other field where it is, 2 less; what is beside is a stage's barriers, reads and factors.
    ptxas 13.0 makes 3.38, 3.16, 3.03, 1.94 and 1.70. NF4's 8 take 22, 17 of them prmt: 5.78 and 4.31."""
    assert per_weight(TYPES[name], dtype, m, schedule, weights) <= most
