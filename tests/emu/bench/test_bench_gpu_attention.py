"""The parts "attention", "backward" and "paged" of bench/gpu/run.py on the emulator, and that they notice
what is wrong."""
from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from bench.gpu import attention as gpu_attention
from bench.gpu import backward as gpu_backward
from bench.gpu import paged as gpu_paged

OPTIONS = [Namespace(arch=arch, seed=1) for arch in ("sm_80", "sm_90a")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.arch)
@pytest.mark.parametrize("workload", [gpu_attention.Forward(2, 4, 512, 64, True),
                                      gpu_attention.Forward(1, 4, 100, 128, False, 2)], ids=lambda w: w.name)
def test_attention(workload: gpu_attention.Forward, options: Namespace):
    row = gpu_attention.run_emulated(workload, options)
    assert row["status"] == "emulated", row["why"]
    assert row["schedule"].startswith("flash_")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.arch)
def test_paged(options: Namespace):
    row = gpu_paged.run_emulated(gpu_paged.Paged(4, 150), options)
    assert row["status"] == "emulated", row["why"]
    assert row["schedule"].startswith("decode")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.arch)
@pytest.mark.parametrize("workload", [
    gpu_backward.Backward(gpu_attention.Forward(2, 4, 512, 64, True, 2)),
    gpu_backward.Backward(gpu_attention.Forward(1, 2, 100, 128, False), True)], ids=lambda w: w.name)
def test_backward(workload: gpu_backward.Backward, options: Namespace):
    row = gpu_backward.run_emulated(workload, options)
    assert row["status"] == "emulated", row["why"]
    assert row["schedule"].startswith("flash_backward_")


def test_wrong_gradients_are_said():
    one = gpu_backward.Backward(gpu_attention.Forward(1, 2, 64, 64, True)).make_inputs("cpu")[0]
    workload = gpu_backward.Backward(gpu_attention.Forward(1, 2, 64, 64, True))
    leaves = [one[name].double().requires_grad_() for name in "qkv"]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    made = torch.autograd.grad(out, leaves, one["grad"].double())
    for name, right in zip(gpu_backward.RESULTS, made, strict=True): one[name] = right.bfloat16()
    assert workload.unlike(one) == ""
    for name in gpu_backward.RESULTS:
        assert workload.unlike({**one, name: one[name] * 1.1}).startswith(f"{name}: sequence 0")


@pytest.mark.parametrize("workload", [gpu_attention.Forward(1, 2, 64, 64, True), gpu_paged.Paged(2, 100)],
                         ids=["attention", "paged"])
def test_what_is_wrong_is_said(workload: Any):
    one = workload.make_inputs("cpu")[0]
    one["out"].zero_()
    assert "off by" in workload.unlike(one)


def test_names_differ_and_work_is_counted():
    for shapes in (list(gpu_attention.shapes()), list(gpu_backward.shapes()), list(gpu_paged.shapes())):
        assert len({each.name for each in shapes}) == len(shapes)
    full = gpu_attention.Forward(1, 1, 64, 64, False)
    assert full.work == full.spec.flops
    causal = gpu_attention.Forward(1, 1, 64, 64, True)
    assert abs(causal.work / causal.spec.flops - 1) < 0.02
    assert gpu_paged.Paged(1, 512).nbytes == 2 * 512 * 8 * 128 * 2
