"""Schedules that a GPU has no room for, in words with the arithmetic."""
from __future__ import annotations

import pytest
from tinygrad.dtype import dtypes

from tests.support.tile.language_gpu_case import program, ref
from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.tile.language import context as C
from tinygrad_nv.tile.language import control as K
from tinygrad_nv.tile.language import elements as E
from tinygrad_nv.tile.language import linear as L
from tinygrad_nv.tile.language.gpu import build, problems
from tinygrad_nv.tile.language.ir import Program
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.template import GPU

F32, BF16 = dtypes.float32, dtypes.bfloat16


def matmul(size: int, dtype=BF16) -> Program:
    def run(a, b, o):
        acc = E.zeros((size, size), F32)
        for k in K.blocks(a.shape[1], 64): acc = L.dot(a[C.block(0, size), k], b[C.block(0, size), k].T, acc)
        o[:, :] = acc
    tensors = [ref("o", F32, size, size, out=True), ref("a", dtype, size, 640), ref("b", dtype, size, 640)]
    return program(run, tensors)


def only(made: Program, schedule: TileSchedule, arch: str) -> str:
    found, = problems(made, schedule, GPU(arch))
    with pytest.raises(ScheduleError, match="use smaller blocks"): build(made, schedule, GPU(arch))
    return found


def test_warps() -> None:
    assert only(matmul(64), TileSchedule(warps=3), "sm_80") == "3 warps: a kernel has 1, 2, 4, 8, 16 or 32"
    assert only(matmul(64), TileSchedule(warps=64), "sm_80").startswith("64 warps")
    assert only(matmul(64), TileSchedule(vector=3), "sm_80").startswith("vectors of 3 elements")


def test_shared_memory() -> None:
    """Six stages of two operands of 128 x 64 elements of 2 bytes."""
    found = only(matmul(128), TileSchedule(stages=6, warps=8), "sm_80")
    assert found.startswith(f"{6 * 2 * 128 * 64 * 2} B of shared memory")
    assert found.endswith("sm_80 has 166912")
    assert not problems(matmul(128), TileSchedule(stages=6, warps=8), GPU("sm_90a"))


def test_registers() -> None:
    found = only(matmul(256), TileSchedule(warps=4), "sm_80")
    assert "256x256xf32 takes 512 registers of each of 128 threads: there are 255" in found
    assert "test_language_gpu_refused.py" in found
    # 512 threads, and a producer's 128
    assert "takes 128 registers of each of 512 threads: there are 104" in only(
        matmul(256), TileSchedule(warps=16, stages=3), "sm_90a")


def test_architectures() -> None:
    assert only(matmul(64), TileSchedule(), "sm_75") == "sm_75 is not sm_80, sm_89, sm_90a"
    assert "conversions begin with sm_89" in only(matmul(64, dtypes.fp8e4m3), TileSchedule(), "sm_80")


def test_a_loop_begins_ahead_as_far_as_there_is_room() -> None:
    """Two iterations ahead are three stages of 128 KiB; one stage there is room for."""
    def run(a, b, o):
        acc = E.zeros((256, 64), F32)
        for k in K.blocks(a.shape[1], 256, prefetch=2): acc = L.dot(a[:, k], b[:, k].T, acc)
        o[:, :] = acc
    tensors = [ref("o", F32, 256, 64, out=True), ref("a", BF16, 256, 1024), ref("b", BF16, 64, 1024)]
    made, schedule = program(run, tensors), TileSchedule(warps=8)
    for arch in ("sm_80", "sm_90a"):
        assert not problems(made, schedule, GPU(arch))
        assert build(made, schedule, GPU(arch)).dynamic_smem < 170 << 10
