"""What ptxas and the emulator count of default schedules of the wgmma template: registers, no spill, nothing
serialised, the main loop's instructions, bank conflicts."""
from __future__ import annotations

import time

import pytest
from gemm_case import arguments, launched, product
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.sass import disassembled, functions, main_loop
from tinygrad_nv.tile.expression import Load, Sum, silu
from tinygrad_nv.tile.gemm.schedules import Wgmma
from tinygrad_nv.tile.gemm.wgmma.plan import REGISTERS
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

W = Wgmma()
BF16, F16, F32, E4M3, S8 = dtypes.bfloat16, dtypes.float16, dtypes.float32, dtypes.fp8e4m3, dtypes.int8
# schedule, dtype, majors, the most SASS instructions for an HGMMA of the main loop; Triton 3.9 has 15.5 for
# 128x256x64 of bf16
DEFAULTS = {
    "128x256": (W.block(128, 256), BF16, "KK", 12),
    "128x256 MN": (W.block(128, 256), F16, "MM", 12),
    "256x128": (W.block(256, 128), BF16, "KK", 8),
    "128x128 ping-pong": (W.block(128, 128).pingpong(), BF16, "KK", 8),
    "128x256 cluster": (W.block(128, 256).cluster(2), BF16, "KM", 12),
    "128x256 cluster 2x2": (W.block(128, 256).cluster(2, 2), BF16, "KK", 12),
    "128x256 split": (W.block(128, 256).split(4), BF16, "KK", 12),
    "128x256 stream": (W.block(128, 256).streamed(), BF16, "KK", 12),
    "192x128": (W.block(192, 128).warps(16), BF16, "KK", 12),
    "64x256": (W.block(64, 256).warps(8), BF16, "KK", 12),
    "fp8": (W.block(128, 128).k(128), E4M3, "KK", 28),
    "int8": (W.block(128, 256).k(128), S8, "KK", 12),
    "tf32": (W.block(128, 256).k(32), F32, "KK", 12)}


@pytest.mark.parametrize("name", DEFAULTS)
def test_main_loops_are_short_and_nothing_spills(name: str):
    schedule, dtype, majors, most = DEFAULTS[name]
    out = dtypes.int32 if dtype == S8 else F32 if dtype == E4M3 else dtype
    made = TABLE.build(product(4096, 4096, 4096, dtype, out, majors), schedule, GPU("sm_90a"))
    assembly = assemble(made.ptx, "sm_90a")  # raises where ptxas serialised or ignored anything
    found = assembly.kernels["gemm_wgmma"]
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    loop = main_loop(functions(disassembled(assembly.cubin))["gemm_wgmma"])
    assert loop is not None
    assert loop.around <= most * loop.tensor, loop.counts


@pytest.mark.parametrize("name", DEFAULTS)
def test_no_bank_conflicts_and_all_of_memory_by_tma(name: str):
    """No request of a warp to global memory at all: TMA moves whole sectors. Sums of stream-K go by 16 whole
    sectors, flags by one."""
    schedule, dtype, majors, _ = DEFAULTS[name]
    out = dtypes.int32 if dtype == S8 else F32 if dtype == E4M3 else dtype
    spec = product(2 * schedule.block_m, 256, 6 * schedule.block_k, dtype, out, majors)
    _, report = launched(TABLE.build(spec, schedule, GPU("sm_90a", 4)), spec, arguments(spec), "sm_90a")
    assert report.findings == []
    assert report.stats.bank_conflicts == {}
    assert set(report.stats.sectors_per_request.values()) <= ({1.0, 16.0} if schedule.stream else set())


WIDEST = {"one consumer": W.block(128, 192).warps(8), "two": W.block(256, 200).stages(2),
          "three": W.block(192, 200).warps(16).stages(2), "turns": W.block(128, 200).stages(2).pingpong(),
          "three turns": W.block(64, 200).warps(16).stages(3).pingpong(),
          "8 splits": W.block(128, 256).split(8), "stream-K": W.block(256, 160).stages(3).streamed()}


@pytest.mark.parametrize("name", WIDEST)
def test_the_most_sums_fit_beside_a_long_epilogue(name: str):
    """A bias along rows, silu in the result's dtype, a residual."""
    bias, residual = Load(0, BF16, 0, 1), Load(1, BF16, 4096, 1)
    spec = product(4096, 4096, 4096, epilogue=silu(Sum().cast(BF16) + bias) + residual)
    found = assemble(TABLE.build(spec, WIDEST[name], GPU("sm_90a")).ptx, "sm_90a").kernels["gemm_wgmma"]
    assert (found.spill_store_bytes, found.spill_load_bytes) == (0, 0)


def test_registers_are_within_the_pool():
    """Of 65536 registers, a warpgroup of 128 threads can have 512 a thread, shared by all warpgroups."""
    for consumers, (fewer, more) in REGISTERS.items():
        assert fewer + consumers * more <= 512


def test_the_text_is_written_in_a_tenth_of_a_second():
    """Of one processor; best of five."""
    spec = product(4096, 4096, 4096)

    def once() -> float:
        start = time.process_time()
        TABLE.build(spec, W.block(128, 256), GPU("sm_90a"))
        return time.process_time() - start

    assert min(once() for _ in range(5)) < 0.1


@pytest.mark.parametrize("dtype", [BF16])
def test_only_tensor_cores_multiply(dtype: DType):
    kernel = TABLE.build(product(512, 512, 512, dtype), W.block(128, 256), GPU("sm_90a"))
    assembly = assemble(kernel.ptx, "sm_90a")
    loop = main_loop(functions(disassembled(assembly.cubin))["gemm_wgmma"])
    assert loop is not None
    assert not {"FFMA", "FMUL", "FADD", "LDL", "STL"} & set(loop.counts)
