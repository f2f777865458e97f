"""Loops whose operands are copied ahead, by cp.async or by a producer warp with TMA: kernels of the tile
language on the emulated GPU against the interpreter. And schedules that a GPU has no room for."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tinygrad.dtype import DType, dtypes

from tests.support.tile.language_gpu_case import checked, inputs, launched, program, ref
from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.ptx.emulator import LATE
from tinygrad_nv.tile.language import context as C
from tinygrad_nv.tile.language import control as K
from tinygrad_nv.tile.language import elements as E
from tinygrad_nv.tile.language import linear as L
from tinygrad_nv.tile.language import memory as M
from tinygrad_nv.tile.language import reductions as R
from tinygrad_nv.tile.language import roles
from tinygrad_nv.tile.language import values as V
from tinygrad_nv.tile.language.gpu import build, problems
from tinygrad_nv.tile.language.ir import Program, TensorParameter
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.template import GPU

F32, F16, BF16, S32, S8 = dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.int32, dtypes.int8
SEEDS = (0, 1, 2, LATE)
archs = pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])


def text(made: Program, schedule: TileSchedule, arch: str) -> str: return build(made, schedule, GPU(arch)).ptx


def matmul(a, b, o):
    i, j = C.block(C.program_id(0) * 64, 64), C.block(C.program_id(1) * 64, 64)
    acc = E.zeros((64, 64), S32 if a.dtype == S8 else F32)
    for k in K.blocks(a.shape[1], 64): acc = L.dot(a[i, k], b[j, k].T, acc)
    o[i, j] = acc


def operands(dtype: DType, m: int, n: int, k: int) -> list[TensorParameter]:
    return [ref("o", S32 if dtype == S8 else F32, m, n, out=True), ref("a", dtype, m, k), ref("b", dtype, n,
                                                                                              k)]


@pytest.mark.sampled(1)
@archs
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_stages(stages: int, arch: str) -> None:
    """More iterations than stages, and fewer."""
    for k in (64, 128, 64 * (stages + 2)):
        made = program(matmul, operands(BF16, 64, 64, k))
        checked(made, TileSchedule(stages=stages), arch, integers=True, ulps=0.5, seeds=SEEDS)


@archs
@pytest.mark.parametrize("dtype", [F16, S8, dtypes.fp8e4m3], ids=str)
def test_edges(dtype: DType, arch: str) -> None:
    """A last block that reaches beyond K, rows and columns beyond the result."""
    if dtype == dtypes.fp8e4m3 and arch == "sm_80": arch = "sm_89"
    made = program(matmul, operands(dtype, 100, 80, 304), grid=(2, 2))
    checked(made, TileSchedule(warps=8, stages=3), arch, integers=True, ulps=0.5, seeds=SEEDS)


def test_how_stages_are_filled() -> None:
    """By TMA where it can: rows of 100 elements begin at no multiples of 16 bytes."""
    schedule = TileSchedule()
    assert "cp.async.bulk.tensor" in text(program(matmul, operands(BF16, 64, 64, 320)), schedule, "sm_90a")
    narrow = text(program(matmul, operands(BF16, 64, 64, 100)), schedule, "sm_90a")
    assert "cp.async.bulk" not in narrow
    assert "cp.async.ca.shared.global" in narrow
    old = text(program(matmul, operands(BF16, 64, 64, 320)), schedule, "sm_80")
    assert "cp.async.cg.shared.global" in old
    assert "wgmma" not in old
    assert "cp.async.ca" not in text(program(matmul, operands(BF16, 64, 64, 333)), schedule, "sm_80")


def gated(a, b, c, o):
    i = C.block(0, 64)
    x, y = E.zeros((64, 32), F32), E.zeros((64, 32), F32)
    for k in K.blocks(a.shape[1], 32):
        x = L.dot(a[i, k], b[:, k].T, x)
        y = L.dot(a[i, k], c[:, k].T, y)
    o[i, :] = E.silu(x * 0.01) * y


@archs
def test_two_accumulators(arch: str) -> None:
    tensors = [ref("o", F32, 64, 32, out=True), ref("a", BF16, 64, 256), *(ref(n, BF16, 32,
                                                                               256) for n in "bc")]
    checked(program(gated, tensors), TileSchedule(stages=4), arch, integers=True, ulps=8, seeds=SEEDS)


def twice(a, b, o, p):
    x, y = E.zeros((64, 64), F32), E.zeros((64, 64), F32)
    for k in K.blocks(a.shape[1], 64): x = L.dot(a[:, k], b[:, k].T, x)
    o[:, :] = V.cast(R.softmax(x * 0.01), F32) + R.sum_(x, 0)[None, :]
    for k in K.blocks(a.shape[1], 64): y = L.dot(b[:, k], a[:, k].T, y)
    p[:, :] = V.cast(y.T, BF16)


@archs
def test_two_loops(arch: str) -> None:
    """What comes between and behind uses shared memory for other things."""
    tensors = [ref("o", F32, 64, 64, out=True), ref("p", BF16, 64, 64, out=True), ref("a", BF16, 64, 256),
               ref("b", BF16, 64, 256)]
    checked(program(twice, tensors), TileSchedule(stages=3), arch, integers=True, ulps=8, seeds=SEEDS)


def persistent(a, b, o):
    for j in K.range_(C.program_id(0), 3, 2):
        acc = E.zeros((64, 64), F32)
        for k in K.blocks(a.shape[1], 32): acc = L.dot(a[:, k], b[C.block(j * 64, 64), k].T, acc)
        o[:, C.block(j * 64, 64)] = acc


@archs
def test_a_loop_in_a_loop(arch: str) -> None:
    tensors = [ref("o", F32, 64, 192, out=True), ref("a", BF16, 64, 160), ref("b", BF16, 192, 160)]
    checked(program(persistent, tensors, grid=(2,)), TileSchedule(stages=3), arch, integers=True, ulps=0.5,
            seeds=SEEDS)


def paged(q, keys, table, count, o):
    n, m = M.load(count, 0), E.fill((64,), -E.INF)
    for page in K.range_(0, n):
        s = L.dot(q[:, :], keys[M.load(table, page), :, :].T)
        m = E.maximum(m, R.max_(s, 1))
    o[:] = m


@archs
@pytest.mark.parametrize("count", [0, 1, 7])
def test_places_that_come_from_memory(count: int, arch: str) -> None:
    """And a number of iterations that does: none, too."""
    tensors = [ref("o", F32, 64, out=True), ref("q", BF16, 64, 64), ref("keys", BF16, 9, 32, 64),
               ref("table", S32, 8), ref("count", S32, 1)]
    table = np.random.default_rng(0).permutation(9)[:8]
    checked(program(paged, tensors), TileSchedule(stages=3), arch, integers=True, ulps=0.5, seeds=SEEDS,
            table=table, count=np.array([count]))


def looked_at(a, b, o, p):
    acc, most = E.zeros((64, 64), F32), E.fill((64,), -E.INF)
    for k in K.blocks(a.shape[1], 64):
        most = E.maximum(most, R.max_(acc, 1))
        acc = L.dot(a[:, k], b[:, k].T, acc * 0.5)
    o[:, :] = acc
    p[:] = most


@archs
def test_sums_that_the_next_iteration_looks_at(arch: str) -> None:
    tensors = [ref("o", F32, 64, 64, out=True), ref("p", F32, 64, out=True), ref("a", BF16, 64, 320),
               ref("b", BF16, 64, 320)]
    checked(program(looked_at, tensors), TileSchedule(stages=3), arch, integers=True, ulps=2, seeds=SEEDS)


def in_place(o, w):
    """Each block is made of the one before: no block can be copied ahead, w can."""
    for i in K.range_(0, 4):
        made = L.dot(o[C.block(i * 64, 64), :], w[:, :])
        o[C.block(i * 64 + 64, 64), :] = V.cast(made, BF16)


def in_place_by_roles(o, w):
    pipe = roles.pipe(2)
    with roles.role("producer"):
        for i in K.range_(0, 4):
            pipe.acquire()
            pipe.commit(o[C.block(i * 64, 64), :])
    with roles.role("consumer"):
        for i in K.range_(0, 4):
            o[C.block(i * 64 + 64, 64), :] = V.cast(L.dot(pipe.wait(), w[:, :]), BF16)
            pipe.release()


@archs
@pytest.mark.parametrize("fn", [in_place, in_place_by_roles])
def test_blocks_that_the_loop_writes(fn: Any, arch: str) -> None:
    first = np.random.default_rng(0).integers(-4, 5, (320, 64)).astype(np.float32)
    mixed = np.eye(64, dtype=np.float32)[np.random.default_rng(1).permutation(64)]
    found = checked(program(fn, [ref("o", BF16, 320, 64, out=True), ref("w", BF16, 64, 64)]),
                    TileSchedule(stages=3), arch, ulps=0, seeds=SEEDS, o=first, w=mixed)
    np.testing.assert_array_equal(found["o"][:64], first[:64])


def branching(a, b, o):
    acc = E.zeros((64, 64), F32)
    for k in K.range_(0, 4):
        if k % 2 == 0: acc = L.dot(a[:, C.block(k * 64, 64)], b[:, C.block(k * 64, 64)].T, acc)
        else: acc = acc + 1.0
    o[:, :] = acc


@archs
def test_a_dot_in_a_branch(arch: str) -> None:
    checked(program(branching, operands(BF16, 64, 64, 256)), TileSchedule(stages=3), arch, integers=True,
            ulps=0.5,
            seeds=SEEDS)


def test_no_conflicts_of_banks() -> None:
    """Operands are read by ldmatrix without a conflict."""
    made = program(matmul, operands(BF16, 64, 64, 320))
    _, report = launched(made, inputs(made), TileSchedule(), "sm_80", 0)
    assert not any(site.conflicts for site in report.stats.sites if site.opcode.startswith("ldmatrix"))


def test_registers_of_roles() -> None:
    """Of a multiprocessor's 65536: 40 of a producer's threads and 232 of two warpgroups'."""
    from tinygrad_nv.tile.language.gpu.registers import register_counts
    assert register_counts(8) == (40, 232)
    assert register_counts(4) == (0, 0)
    few, many = register_counts(16)
    assert 128 * few + 512 * many <= 65536
    assert "setmaxnreg.inc.sync.aligned.u32 232" in text(program(matmul, operands(BF16, 128, 64, 320)),
                                                         TileSchedule(warps=8), "sm_90a")


def kept_by_a_branch(a, b, o):
    acc = E.zeros((64, 64), F32)
    for k in K.range_(0, 5):
        scaled = acc
        if k > 2: scaled = acc * 0.5
        acc = L.dot(a[:, C.block(k * 64, 64)], b[:, C.block(k * 64, 64)].T, scaled)
    o[:, :] = acc


@archs
def test_sums_that_a_branch_hands_on(arch: str) -> None:
    made = program(kept_by_a_branch, operands(BF16, 64, 64, 320))
    checked(made, TileSchedule(stages=3), arch, integers=True, ulps=2, seeds=SEEDS)


# **** what a GPU has no room for ****

def large_matmul(size: int, dtype=BF16) -> Program:
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
    assert only(large_matmul(64), TileSchedule(warps=3), "sm_80") \
        == "3 warps: a kernel has 1, 2, 4, 8, 16 or 32"
    assert only(large_matmul(64), TileSchedule(warps=64), "sm_80").startswith("64 warps")
    assert only(large_matmul(64), TileSchedule(vector=3), "sm_80").startswith("vectors of 3 elements")


def test_shared_memory() -> None:
    """Six stages of two operands of 128 x 64 elements of 2 bytes."""
    found = only(large_matmul(128), TileSchedule(stages=6, warps=8), "sm_80")
    assert found.startswith(f"{6 * 2 * 128 * 64 * 2} B of shared memory")
    assert found.endswith("sm_80 has 166912")
    assert not problems(large_matmul(128), TileSchedule(stages=6, warps=8), GPU("sm_90a"))


def test_registers() -> None:
    found = only(large_matmul(256), TileSchedule(warps=4), "sm_80")
    assert "256x256xf32 takes 512 registers of each of 128 threads: there are 255" in found
    assert "test_language_gpu_pipelines.py" in found
    # 512 threads, and a producer's 128
    assert "takes 128 registers of each of 512 threads: there are 104" in only(
        large_matmul(256), TileSchedule(warps=16, stages=3), "sm_90a")


def test_architectures() -> None:
    assert only(large_matmul(64), TileSchedule(), "sm_75") == "sm_75 is not sm_80, sm_89, sm_90a"
    assert "conversions begin with sm_89" in only(large_matmul(64, dtypes.fp8e4m3), TileSchedule(), "sm_80")


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
