"""Bugs in what a kernel left, each with its cure: bench/gpu/run.py's comparisons find the former, on the
emulator as --emulate runs them, and let the latter pass."""
from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu import attention as gpu_attention
from bench.gpu import backward as gpu_backward
from bench.gpu import compare as gpu_compare
from bench.gpu import elementwise as gpu_elementwise
from bench.gpu import gemm as gpu_gemm
from bench.gpu import paged as gpu_paged
from bench.gpu.attention import Forward
from tinygrad_nv.runtime.driver import Launch
from tinygrad_nv.runtime.emulated import driver as emulated
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver

OPTIONS = Namespace(arch="sm_90a", seed=1)
GEMM = gpu_gemm.GemmWorkload("4096x1024x1024", 4096, 1024, 1024)     # 256x64x256 when scaled
ATTENTION = Forward(1, 4, 72, 64, True)             # two heads


def seeded(monkeypatch: pytest.MonkeyPatch, buffer: int, element: int, launch: int, by: float) -> None:
    """After a launch, counted from 1, an element of a buffer, in the order of allocation, is `by` more. Both
    are of bfloat16."""

    class Wrong(EmulatedDriver):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.allocated: list[int] = []
            self.launches = 0

        def alloc(self, nbytes: int) -> int:
            self.allocated.append(super().alloc(nbytes))
            return self.allocated[-1]

        def submit(self, work: Any, stream: Any = None) -> None:
            super().submit(work, stream)
            self.launches += isinstance(work, Launch)
            if not isinstance(work, Launch) or self.launches != launch: return
            word, at = bytearray(2), self.allocated[buffer] + 2 * element
            self.copy_out(memoryview(word), at)
            value = torch.frombuffer(word, dtype=torch.bfloat16) + by
            self.copy_in(at, memoryview(np.frombuffer(gpu_compare.raw(value), np.uint8)))

    monkeypatch.setattr(emulated, "EmulatedDriver", Wrong)


# buffers of a set: out, a, b; q, k, v, out. Launches 1 and 3 write set 0, launch 2 set 1
@pytest.mark.parametrize(("buffer", "row", "launch", "words"), [
    (0, 255, 3, "set 0: row 255, column 7"), (0, 254, 3, "set 0: row 254, column 7"),
    (0, 130, 3, "set 0: row 130, column 7"), (3, 70, 2, "set 1: row 70, column 7")],
    ids=["last row", "a row of the last CTA", "the other consumer", "another set"])
@pytest.mark.parametrize("by", [4.0, 0.0], ids=["bug", "cure"])
def test_a_row_of_a_matmul(monkeypatch: pytest.MonkeyPatch, buffer: int, row: int, launch: int, words: str,
                           by: float):
    seeded(monkeypatch, buffer, row * 64 + 7, launch, by)
    found = gpu_gemm.run_emulated(GEMM, OPTIONS)
    assert found["status"] == ("disagrees" if by else "emulated"), found["why"]
    if by: assert found["why"].startswith(f"ours: {words}: ")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("buffer", "head", "row", "launch", "words"), [
    (3, 0, 5, 3, "set 0: sequence 0, head 0, row 5: off by"),
    (3, 1, 40, 3, "set 0: sequence 0, head 1, row 40: off by"),
    (7, 1, 71, 2, "set 1: sequence 0, head 1, row 71: off by")],
    ids=["an early row", "a head", "another set"])
@pytest.mark.parametrize("by", [0.25, 0.0], ids=["bug", "cure"])
def test_a_head_of_an_attention(monkeypatch: pytest.MonkeyPatch, buffer: int, head: int, row: int,
                                launch: int, words: str, by: float):
    seeded(monkeypatch, buffer, (head * 72 + row) * 64 + 3, launch, by)
    found = gpu_attention.run_emulated(ATTENTION, OPTIONS)
    assert found["status"] == ("disagrees" if by else "emulated"), found["why"]
    if by: assert found["why"].startswith(f"ours: {words}")


def test_a_run_that_goes_wrong_the_second_time(monkeypatch: pytest.MonkeyPatch):
    """As one does that needs flags which it has not put back."""
    seeded(monkeypatch, 0, 0, 1, 4.0)
    assert gpu_gemm.run_emulated(GEMM, OPTIONS)["status"] == "emulated", "the last run wrote it anew"
    seeded(monkeypatch, 0, 0, 3, 4.0)
    assert gpu_gemm.run_emulated(GEMM, OPTIONS)["status"] == "disagrees"


# **** results that were never computed by a kernel: every head, every sequence, every request ****

def right(workload: Forward) -> dict[str, Any]:
    """A set of the CPU's with its exact result."""
    one = workload.make_inputs("cpu")[0]
    q, k, v = (one[name].double() for name in "qkv")
    one["out"] = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=workload.causal, enable_gqa=bool(workload.kv_heads)).bfloat16()
    return one


@pytest.mark.parametrize("chunk", [1 << 26, 1 << 10], ids=["at once", "in pieces"])
@pytest.mark.parametrize("workload", [Forward(2, 5, 64, 64, True), Forward(2, 6, 50, 64, False, 2)],
                         ids=["causal", "grouped"])
def test_every_head_of_every_sequence_is_compared(monkeypatch: pytest.MonkeyPatch, workload: Forward,
                                                  chunk: int):
    monkeypatch.setattr(gpu_attention, "AT_ONCE", chunk)
    one = right(workload)
    assert workload.unlike(one) == ""
    for b in range(workload.batch):
        for head in range(workload.heads):
            out = one["out"].clone()
            out[b, head] *= 1.5
            assert workload.unlike({**one, "out": out}).startswith(f"sequence {b}, head {head}, row ")


def test_rows_of_long_sequences_are_sampled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_attention, "SHORT", 50)
    workload = Forward(1, 2, 128, 64, True)
    one = right(workload)
    rows = workload.rows_to_compare("cpu").tolist()
    assert rows == [0, 5, 48, 91, 102, 127]
    for row in range(128):
        out = one["out"].clone()
        out[0, 1, row] += 1
        assert bool(workload.unlike({**one, "out": out})) == (row in rows)


def test_every_row_of_a_matmul_is_compared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_gemm, "AT_ONCE", 13)
    for shape in (gpu_gemm.GemmWorkload("x", 40, 24, 32), gpu_gemm.GemmWorkload("x", 40, 24, 32, True),
                  gpu_gemm.GemmWorkload("x", 40, 24, 32, fp8=True),
                  gpu_gemm.GemmWorkload("x", 40, 24, 272, fp8=True, blocks=True)):
        one = shape.make_inputs("cpu")[0]
        left, right = (one[name].view(-1, shape.k).double() for name in "ab")
        if shape.blocks:    # 24 rows of w are one block
            left = left * one["a_scale"].view(40, 3).repeat_interleave(128, 1)[:, :272]
            right = right * one["b_scale"].repeat_interleave(128)[:272]
        sums = left @ right.T
        exact = torch.nn.functional.silu(sums[:, :24]) * sums[:, 24:] if shape.gated else sums
        one["out"] = exact.bfloat16().view(-1)
        assert shape.unlike(one) == ""
        for row in range(40):
            out = one["out"].clone()
            out[row * 24 + 5] += 1 + out[row * 24 + 5].abs()
            assert shape.unlike({**one, "out": out}).startswith(f"row {row}, column 5: ")


def test_every_request_is_compared():
    workload = gpu_paged.Paged(9, 40)
    one = workload.make_inputs("cpu")[0]
    for b in range(9):
        k, v = (one[name][one["table"][b].long()].view(-1, 8, 128)[:40].double() for name in "kv")
        p = (torch.einsum("hgd,thd->hgt", one["q"][b].view(8, 4, 128).double(), k) / 128**0.5).softmax(-1)
        one["out"][b] = torch.einsum("hgt,thd->hgd", p, v).view(32, 128)
    assert workload.unlike(one) == ""
    for b in range(9):
        out = one["out"].clone()
        out[b] *= 1.5
        assert workload.unlike({**one, "out": out}).startswith(f"request {b}: ")


@pytest.mark.parametrize("short", [1024, 20], ids=["every row", "some rows"])
def test_gradients_of_every_head_are_compared(monkeypatch: pytest.MonkeyPatch, short: int):
    monkeypatch.setattr(gpu_attention, "SHORT", short)
    workload = gpu_backward.Backward(Forward(2, 4, 64, 64, True, 2))
    torch.manual_seed(7)
    one = workload.make_inputs("cpu")[0]
    leaves = [one[name].double().requires_grad_() for name in "qkv"]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    made = torch.autograd.grad(out, leaves, one["grad"].double())
    for name, exact in zip(gpu_backward.RESULTS, made, strict=True): one[name] = exact.bfloat16()
    assert workload.unlike(one) == ""
    for name in gpu_backward.RESULTS:
        for b, head in ((b, head) for b in range(2) for head in range(one[name].shape[1])):
            wrong = one[name].clone()
            wrong[b, head] *= 1.5
            keys = head // 2 if name == "dq" else head
            assert f"{name}: sequence {b}, head {keys} of keys: off" in workload.unlike({**one, name: wrong})


def test_what_is_not_written_is_said():
    for workload in (Forward(1, 2, 64, 64, True), gpu_paged.Paged(2, 100),
                     gpu_elementwise.ElementwiseWorkload("rms", 4, 64),
                     gpu_gemm.GemmWorkload("x", 16, 16, 32),
                     gpu_backward.Backward(Forward(1, 1, 32, 64, True))):
        given = workload.make_inputs("cpu")
        gpu_compare.poison(workload, given)
        name = workload.results[0]
        assert gpu_compare.differs(workload, given) == f"set 0: elements of {name} were not written"
