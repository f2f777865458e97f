"""Roles and pipes on the emulated GPU: against the interpreter, with early and late copies; and that its
checks see a kernel whose roles do not wait for each other."""
from __future__ import annotations

from typing import Any

import pytest
from tinygrad.dtype import dtypes

from tests.support.tile.language_gpu_case import checked, inputs, launched, program, ref
from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.ptx.emulator import LATE
from tinygrad_nv.tile.language import context as C
from tinygrad_nv.tile.language import control as K
from tinygrad_nv.tile.language import elements as E
from tinygrad_nv.tile.language import linear as L
from tinygrad_nv.tile.language import reductions as R
from tinygrad_nv.tile.language import roles
from tinygrad_nv.tile.language import values as V
from tinygrad_nv.tile.language.gpu import build, problems
from tinygrad_nv.tile.language.gpu import kernel as text_of
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.pipeline import Pipeline
from tinygrad_nv.tile.template import GPU

F32, BF16 = dtypes.float32, dtypes.bfloat16
SEEDS = (0, 1, 2, LATE)
archs = pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
stage_counts = pytest.mark.parametrize("stages", [1, 2, 3, 5])


def matmul(a, b, o, stages):
    i, j = C.block(C.program_id(0) * 64, 64), C.block(C.program_id(1) * 64, 64)
    pipe, acc = roles.pipe(stages), E.zeros((64, 64), F32)
    with roles.role("producer"):
        for k in K.blocks(a.shape[1], 64):
            pipe.acquire()
            pipe.commit(a[i, k], b[j, k].T)
    with roles.role("consumer"):
        for _ in K.blocks(a.shape[1], 64):
            x, y = pipe.wait()
            acc = L.dot(x, y, acc)
            pipe.release()
    o[i, j] = acc


def operands(m: int, n: int, k: int) -> list[Any]:
    return [ref("o", F32, m, n, out=True), ref("a", BF16, m, k), ref("b", BF16, n, k)]


@archs
@stage_counts
def test_stages_of_a_pipe(stages: int, arch: str) -> None:
    """Whatever the schedule says: fewer iterations than stages, and more."""
    for k in (64, 64 * (stages + 2)):
        made = program(matmul, operands(128, 64, k), grid=(2, 1), more={"stages": stages})
        checked(made, TileSchedule(stages=4), arch, integers=True, ulps=0.5, seeds=SEEDS)
    stage = 2 * 64 * 64 * 2
    found = build(made, TileSchedule(stages=4), GPU(arch)).dynamic_smem
    if stages == 5: assert stages * stage <= found < (stages + 1) * stage


def test_a_warp_of_its_own() -> None:
    """On sm_90a four warps more, of which one brings tiles; registers go to the consumers."""
    made = program(matmul, operands(64, 64, 320), more={"stages": 3})
    kernel = build(made, TileSchedule(warps=8), GPU("sm_90a"))
    assert kernel.threads == 12 * 32
    assert "cp.async.bulk.tensor" in kernel.ptx
    assert "setmaxnreg.dec" in kernel.ptx
    assert "setmaxnreg.inc" in kernel.ptx
    assert "cp.async.cg.shared.global" in build(made, TileSchedule(warps=8), GPU("sm_80")).ptx


def test_stages_without_room_are_refused() -> None:
    """A pipe has the stages that it says, or there is no kernel: the arithmetic."""
    made = program(matmul, operands(64, 64, 320), more={"stages": 16})
    assert "16" in str(made)
    found = " ".join(problems(made, TileSchedule(), GPU("sm_90a")))
    assert "262144 B of operands" in found or "B of shared memory" in found


def walking(a, b, o, stages):
    pipe = roles.pipe(stages)
    with roles.role("producer"):
        for j in K.range_(C.program_id(0), 5, 2):
            for k in K.blocks(a.shape[1], 64):
                pipe.acquire()
                pipe.commit(a[:, k], b[C.block(j * 64, 64), k].T)
    with roles.role("consumer"):
        for j in K.range_(C.program_id(0), 5, 2):
            acc = E.zeros((64, 64), F32)
            for _ in K.blocks(a.shape[1], 64):
                x, y = pipe.wait()
                acc = L.dot(x, y, acc)
                pipe.release()
            o[:, C.block(j * 64, 64)] = acc


@archs
@stage_counts
def test_loops_in_loops(stages: int, arch: str) -> None:
    """The producer goes on to the next tiles while the consumer stores."""
    made = program(walking, operands(64, 320, 64 * (stages + 2)), grid=(2,), more={"stages": stages})
    checked(made, TileSchedule(), arch, integers=True, ulps=0.5, seeds=SEEDS)


def attention(q, keys, values, o):
    first, second = roles.pipe(3), roles.pipe(3)
    with roles.role("producer"):
        for j in K.blocks(keys.shape[0], 64):
            first.acquire()
            first.commit(keys[j, :])
            second.acquire()
            second.commit(values[j, :])
    acc, m, l = E.zeros((64, 64), F32), E.fill((64,), -E.INF), E.zeros((64,), F32)
    rows = q[:, :]
    with roles.role("consumer"):
        for _ in K.blocks(keys.shape[0], 64):
            s = L.dot(rows, first.wait().T) * 0.125
            first.release()
            top = E.maximum(m, R.max_(s, 1))
            p, old = E.exp(s - top[:, None]), E.exp(m - top)
            acc = L.dot(V.cast(p, BF16), second.wait(), acc * old[:, None])
            second.release()
            m, l = top, l * old + R.sum_(p, 1)
    o[:, :] = acc / l[:, None]


@archs
def test_two_pipes(arch: str) -> None:
    tensors = [ref("o", F32, 64, 64, out=True), ref("q", BF16, 64, 64), ref("keys", BF16, 320, 64),
               ref("values", BF16, 320, 64)]
    checked(program(attention, tensors), TileSchedule(), arch, exact=3.0, seeds=SEEDS)


# **** wrong kernels ****

def findings(made: Any, arch: str) -> list[str]:
    """What the emulator says of a program's kernel, by the order of its asynchronous work."""
    text_of._write.cache_clear()
    try:
        return [str(each) for seed in SEEDS
                for each in launched(made, inputs(made), TileSchedule(), arch, seed)[1].findings]
    finally: text_of._write.cache_clear()


def test_a_producer_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies meet products of the stage: a race that the emulator names. The kernel as it is has none."""
    made = program(matmul, operands(64, 64, 64 * 5), more={"stages": 2})
    assert not findings(made, "sm_90a")

    def acquire(self: Pipeline, at: Any) -> Any:
        full = self._full(at)
        self.kb.mbarrier_expect(full.at(), self.nbytes)
        return full.at()
    monkeypatch.setattr(Pipeline, "acquire", acquire)
    assert findings(made, "sm_90a")


def test_a_consumer_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    made = program(matmul, operands(64, 64, 64 * 5), more={"stages": 3})
    monkeypatch.setattr(Pipeline, "wait", lambda self, at: None)
    assert findings(made, "sm_90a")


def test_copies_that_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By cp.async: one group more in flight than there may be."""
    made = program(matmul, operands(64, 64, 64 * 5), more={"stages": 3})
    assert not findings(made, "sm_80")
    waits = Kernel.cp_async_wait
    monkeypatch.setattr(Kernel, "cp_async_wait", lambda self, left: waits(self, left + 1))
    assert findings(made, "sm_80")
