"""Predictions on GPUs with published figures: reads on an H200, matmuls on an A100 and an L40S."""
from __future__ import annotations

import numpy as np
import pytest

from bench.gpu.l2 import reader
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.timing.gpu import figures
from tinygrad_nv.ptx.timing.model import Timing
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.schedules import Mma
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE


def read(name: str, nbytes: int) -> Timing:
    """A plain read, 8 CTAs of 256 threads on each SM."""
    gpu = figures(name)
    emu, ctas = Emulator(gpu.arch, check=False), gpu.sms * 8
    out, source = emu.alloc(np.zeros(ctas * 256, np.uint32)), emu.alloc(np.zeros(nbytes, np.uint8))
    arguments = [out, source, nbytes // 16]
    found = emu.launch(reader(gpu.arch), ctas, 256, arguments, "l2_read", timing=name).timing
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("megabytes", "terabytes_per_s"), [
    (80, 3.49), pytest.param(285, 4.23, marks=pytest.mark.slow)])
def test_reads_on_an_h200_take_what_was_published(megabytes: int, terabytes_per_s: float):
    """5.6 us + bytes / 4.61 TB/s (HOPPER_TIMING.md 7.4)."""
    nbytes = megabytes * 1_000_000 // 4096 * 4096
    found = read("h200", nbytes)
    assert found.limiter == "HBM"
    assert found.seconds == pytest.approx(5.6e-6 + nbytes / 4.61e12, rel=0.02)
    assert nbytes / found.seconds / 1e12 == pytest.approx(terabytes_per_s, rel=0.03)


def matmul(name: str, m: int, n: int, k: int, schedule: Mma | None = None) -> Timing:
    gpu = figures(name)
    spec, target = dense(m, n, k), GPU(gpu.arch, gpu.sms)
    made = TABLE.build(spec, schedule or TABLE.choose(spec, target), target)
    emu = Emulator(gpu.arch, check=False)
    memory = [emu.alloc(np.zeros(count, np.uint16)) for count in (m * n, m * k, n * k)]
    found = emu.launch(made.ptx, made.grid_for(m), made.threads, memory, dynamic_smem=made.dynamic_smem,
                       timing=name).timing
    assert found is not None
    assert found.unknown == ()
    return found


@pytest.mark.parametrize(("shape", "published"), [
    pytest.param((3456, 4096, 8192), 235, marks=pytest.mark.slow), ((3456, 1024, 2048), 234)])
def test_matmuls_on_an_a100_are_near_those_of_others(shape: tuple[int, int, int], published: float):
    """Of mma.sync and cp.async with tiles of 128 x 256: CUTLASS (profiler.md), IREE (pull request 13504)."""
    found = matmul("a100", *shape, Mma().block(128, 256).k(32).warps(2, 4).stages(3))
    assert found.tflops == pytest.approx(published, rel=0.12)


@pytest.mark.slow
def test_large_matmuls_reach_what_cublas_does_on_an_a100():
    """240 to 271 TFLOP/s of 312 (github.com/stas00/ml-engineering)."""
    found = matmul("a100", 8192, 8192, 8192)
    assert 235 < found.tflops < 275
    assert found.limiter == "tensor cores"
    assert found.clock_hz < figures("a100").clock_hz


@pytest.mark.slow
def test_an_l40s_sums_in_32_bits_at_full_rate_and_is_limited_by_power():
    found = matmul("l40s", 2048, 2048, 2048)
    assert 181 < found.tflops < 362
    assert found.limiter == "tensor cores"
    assert found.clock_hz < 2.2e9
    few = matmul("l40s", 16, 4096, 4096)
    assert few.limiter == "HBM"
    assert few.seconds > 16 * 4096**2 / 8 / 0.864e12
