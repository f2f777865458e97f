"""Parts of bench/gpu/run.py on the emulator, beside torch on a CPU where they have peers: rows are those of
the committed results, and what is wrong is noticed."""
from __future__ import annotations

import json
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import all_reduce as gpu_all_reduce
from bench.gpu import attention as gpu_attention
from bench.gpu import backward as gpu_backward
from bench.gpu import decode as gpu_decode
from bench.gpu import elementwise as gpu_elementwise
from bench.gpu import latent as gpu_latent
from bench.gpu import moe as gpu_moe
from bench.gpu import paged as gpu_paged
from bench.gpu.compare import differs, wrong
from bench.gpu.decode import TINY, DecodeWorkload, StepProcess
from bench.gpu.elementwise import OPERANDS, ElementwiseWorkload, GroupNormWorkload
from bench.gpu.moe_contenders import deep_gemm, pad_groups, torch_grouped_mm, vllm_experts
from bench.gpu.parts import NotMeasured
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.template import GPU

BOTH = [Namespace(arch=arch, seed=1) for arch in ("sm_80", "sm_90a")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", BOTH, ids=lambda options: options.arch)
@pytest.mark.parametrize("workload", [gpu_attention.Forward(2, 4, 512, 64, True),
                                      gpu_attention.Forward(1, 4, 100, 128, False, 2)], ids=lambda w: w.name)
def test_attention(workload: gpu_attention.Forward, options: Namespace):
    row = gpu_attention.run_emulated(workload, options)
    assert row["status"] == "emulated", row["why"]
    assert row["schedule"].startswith("flash_")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", BOTH, ids=lambda options: options.arch)
def test_paged(options: Namespace):
    row = gpu_paged.run_emulated(gpu_paged.Paged(4, 150), options)
    assert row["status"] == "emulated", row["why"]
    assert row["schedule"].startswith("decode")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", BOTH, ids=lambda options: options.arch)
def test_latent(options: Namespace):
    row = gpu_latent.run_emulated(gpu_latent.LatentWorkload(128, 4, 150), options)
    assert row["status"] == "emulated", row["why"]
    assert row["schedule"].startswith("latent_wgmma" if options.arch == "sm_90a" else "decode")


def test_latent_attention_of_torch_is_right():
    torch.manual_seed(0)
    workload = gpu_latent.LatentWorkload(16, 2, 100)
    given = workload.make_inputs("cpu")
    assert wrong(workload, given, gpu_latent.torch_matmuls(workload, given, Namespace())) == ""
    given[1]["out"][1, 3, 7] += 1
    assert differs(workload, given).startswith("set 1: request 1: off by ")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", BOTH, ids=lambda options: options.arch)
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


@pytest.mark.parametrize("workload", [gpu_attention.Forward(1, 2, 64, 64, True), gpu_paged.Paged(2, 100),
                                      gpu_latent.LatentWorkload(16, 2, 100)],
                         ids=["attention", "paged", "latent"])
def test_what_is_wrong_is_said(workload: Any):
    one = workload.make_inputs("cpu")[0]
    one["out"].zero_()
    assert "off by" in workload.unlike(one)


def test_names_differ_and_work_is_counted():
    for shapes in (list(gpu_attention.shapes()), list(gpu_backward.shapes()), list(gpu_paged.shapes()),
                   list(gpu_latent.shapes())):
        assert len({each.name for each in shapes}) == len(shapes)
    full = gpu_attention.Forward(1, 1, 64, 64, False)
    assert full.work == full.spec.flops
    causal = gpu_attention.Forward(1, 1, 64, 64, True)
    assert abs(causal.work / causal.spec.flops - 1) < 0.02
    assert gpu_paged.Paged(1, 512).nbytes == 2 * 512 * 8 * 128 * 2
    assert gpu_latent.LatentWorkload(128, 1, 512).nbytes == 2 * 512 * 576


BENCH = Path(__file__).parents[3] / "bench"
OPTIONS = Namespace(emulate=True, arch="sm_90a", seed=1, only="")
ROWS = ("all_reduce_one_shot_2_10007_float_0", "all_reduce_two_shot_2_16384_bf16_4096")


def row(name: str) -> dict[str, object]: return gpu_all_reduce.open_worker(OPTIONS)(name, 10.0)


def test_rows_are_those_of_the_results() -> None:
    results = json.loads((BENCH / "results" / "all_reduce_h100-80gb-hbm3.json").read_text())
    assert sorted(gpu_all_reduce.cases()) == sorted(each["case"] for each in results["rows"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_kernels_are_right(name: str) -> None:
    assert row(name) == {"status": "emulated", "why": "as it must be"}


def test_wrong_sums_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    build = gpu_all_reduce.TABLE.build

    def built(*args):
        made = build(*args)
        assert "add.f32" in made.ptx
        return replace(made, ptx=made.ptx.replace("add.f32", "sub.f32"))
    monkeypatch.setattr(gpu_all_reduce.TABLE, "build", built)
    assert row(ROWS[0])["why"] == "x + 0: sums differ"


def test_a_replay_that_differs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are right when they are asked for, and spoiled by the time that a graph compares them."""
    differ = gpu_all_reduce.Ranks.differ
    monkeypatch.setattr(gpu_all_reduce.Ranks, "differ", lambda self, rank, wanted:
                        [*(self.spoil(rank) if rank == 1 else []), *differ(self, rank, wanted)])
    found = row(ROWS[0])
    assert found["status"] == "disagrees"
    assert found["wrong_words"] == [0, 2 * 299 * 2 * gpu_all_reduce.SETS]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("form", OPERANDS)
def test_each_form(form: str, arch: str):
    row = gpu_elementwise.run_emulated(ElementwiseWorkload(form, 1024, 4096), Namespace(arch=arch, seed=1))
    assert row["status"] == "emulated", row["why"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("form", ["group norm", "group norm, silu"])
def test_group_norm(form: str, arch: str):
    row = gpu_elementwise.run_emulated(GroupNormWorkload(form, 2, 320), Namespace(arch=arch, seed=1))
    assert row["status"] == "emulated", row["why"]
    small = GroupNormWorkload(form, 2, 64, side=8)
    given = small.make_inputs("cpu")
    assert wrong(small, given, gpu_elementwise.torch_eager(small, given, Namespace())) == ""
    given[1]["out"][70, 3] += 1
    assert differs(small, given).startswith("set 1: ")


def test_wrong_memory_is_said():
    workload = ElementwiseWorkload("rms", 4, 64)
    one = workload.make_inputs("cpu")[0]
    one["out"].zero_()
    assert re.match(r"0 in row \d, column \d+, exactly \S+; \d+ elements are off", workload.unlike(one))
    one["out"] = gpu_elementwise.theirs("rms", one)
    assert workload.unlike(one) == ""


def test_names_differ_and_bytes_are_counted():
    every = list(gpu_elementwise.shapes())
    assert len({each.name for each in every}) == len(every)
    assert ElementwiseWorkload("residual", 10, 64).nbytes == 2 * 64 * (10 * 3 + 1)
    assert ElementwiseWorkload("silu·mul", 10, 64).nbytes == 2 * 64 * 10 * 3
    assert ElementwiseWorkload("embedding", 10, 64).nbytes == 2 * 2 * 64 * 10 + 4 * 10
    assert GroupNormWorkload("group norm", 2, 64, side=8).nbytes == 2 * 64 * (2 * 2 * 64 + 2)


MOE = Namespace(arch="sm_90a", seed=0, emulate=True)
EVERY = {each.name: each for each in gpu_moe.shapes()}


@pytest.mark.parametrize("name", ["layer Qwen3-235B 16 tokens", "down gpt-oss-20b 64 tokens",
                                  "gate_up Qwen3-235B int4 16 tokens", "gate_up gpt-oss-20b MXFP4 64 tokens"])
def test_rows_are_right_on_the_emulated_device(name: str):
    row = gpu_moe.run_emulated(EVERY[name], MOE)
    assert row["status"] == "emulated", row


def test_every_row_has_a_kernel_and_a_name_of_its_own():
    assert len(EVERY) == len(list(gpu_moe.shapes())) == 66
    for each in EVERY.values():
        for spec, _ in each.stages: assert choose(spec, GPU("sm_90a", 132)) is not None, each.name


@pytest.mark.parametrize("name", [*(f"{part} Mixtral 16 tokens" for part in gpu_moe.PARTS),
                                  "gate_up Qwen3-235B int4 16 tokens"])
def test_a_grouped_matmul_of_torch_is_right_and_another_is_found(name: str):
    torch.manual_seed(0)
    workload = EVERY[name].scale_down()
    given = workload.make_inputs("cpu")
    run = torch_grouped_mm(workload, given, MOE)
    for i, one in enumerate(given):
        run(i)
        assert workload.unlike(one) == ""
    result, = workload.results
    given[0][result].copy_(given[1][result])
    assert workload.unlike(given[0]).startswith(f"{result} row ")


def test_work_and_bytes():
    one = EVERY["layer Mixtral 1 tokens"]
    assert one.work == 2 * 2 * 3 * 4096 * 14336
    assert one.nbytes == pytest.approx(2 * 2 * 3 * 4096 * 14336, rel=1e-3)
    quantised = EVERY["gate_up Qwen3-235B int4 1 tokens"]
    assert quantised.work == EVERY["gate_up Qwen3-235B 1 tokens"].work
    assert quantised.nbytes == pytest.approx(8 * 2 * 1536 * 4096 * (1 / 2 + 2 / 128), rel=1e-2)
    assert EVERY["layer Mixtral 4096 tokens"].nbytes > 8 * 2 * 3 * 4096 * 14336


def test_rows_are_padded_to_whole_tiles():
    assert pad_groups([0, 0, 3, 4], 4) == ([0, 1, 2, 4], [1] * 4 + [2] * 4)


def test_peers_say_why_they_do_not_run():
    for part, peer, words in (("down", vllm_experts, "whole layers alone"),
                              ("layer", deep_gemm, "no whole layer")):
        workload = EVERY[f"{part} Mixtral 1 tokens"].scale_down()
        with pytest.raises(NotMeasured, match=words): peer(workload, workload.make_inputs("cpu"), MOE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("batch", "weights"), [(1, ""), (2, ""), (1, "int4"), (1, "fp8")])
def test_a_step_on_the_emulated_device_gives_the_logits_of_torch(batch: int, weights: str):
    workload = DecodeWorkload("Llama-3.2-1B", batch, 1024, weights)
    row = gpu_decode.run_emulated(workload, Namespace(arch="sm_90a"))
    assert row["status"] == "emulated", row
    ours, theirs = row["logits"]["ours"], row["logits"]["torch"]
    assert len(ours) == len(theirs) == 32
    assert max(map(abs, theirs)) > 0.1
    assert ours != theirs  # two networks, not one


@pytest.mark.slow
def test_sides_answer_with_seconds_of_a_step_and_give_the_same_work_each_time():
    side = StepProcess("torch", json.dumps(TINY), 1, 5, "cpu")
    assert list(side.answer(100)["logits"]) == ["torch"]
    found = [side.steps(2) for _ in range(3)]
    side.end()
    assert all(0 < seconds["torch"] < 5 for seconds, _ in found)
    assert all(joules == {"torch": None} for _, joules in found)  # no GPU, no joules


class Metered:
    """A side that says what it took."""

    def __init__(self, name: str, seconds: float, joules: float | None) -> None:
        self.took = {name: seconds}, {name: joules}

    def steps(self, count: int) -> tuple[dict[str, float], dict[str, float | None]]: return self.took


def test_tokens_for_each_joule():
    row = gpu_decode.in_turns({"ours": Metered("tinygrad", 0.01, 4.0), "torch": Metered("torch", 0.02, 8.0),
                               "tinygrad": Metered("tinygrad", 0.1, None)}, 0.0)
    assert row["joules"] == {"ours": [4.0] * len(row["seconds"]["ours"]),
                             "torch": [8.0] * len(row["seconds"]["torch"])}
    shown = gpu_decode.per_joule({"a step": {"work": 8, **row}, "another": {"why": "no time"}})
    assert shown.split("\n")[-1].split() == ["a", "step", "2", "1", "-", "-"]
    assert gpu_decode.per_joule({"another": {"why": "no time"}}) == ""


def test_a_side_that_fails_says_its_last_words():
    notes: dict[str, str] = {}
    sides = {"ours": StepProcess("torch", json.dumps({**TINY, "hidden_size": 0}), 1, 5, "cpu")}
    assert gpu_decode.await_sides(sides, notes, 100) == {}
    assert sides == {}
    assert "hidden_size" in notes["ours"]


def test_logits_that_are_not_those_of_torch():
    torch = [1.0, -4.0, 2.0]
    assert gpu_decode.unlike({"ours": [1.1, -4.0, 2.1], "torch": torch}) == ""
    assert gpu_decode.unlike({"ours": [1.1, -4.0, 2.2], "torch": torch}) == "ours: logit 2 is 2.2, torch's 2"
    assert "logit 0 is nan" in gpu_decode.unlike({"ours": [float("nan"), -4.0, 2.0], "torch": torch})
    assert gpu_decode.unlike({"ours": torch}) == ""


def test_a_side_that_does_not_answer_is_not_waited_for():
    side = StepProcess("torch", json.dumps(TINY), 1, 5, "cpu")
    with pytest.raises(NotMeasured, match="no answer in 0 s"): side.answer(0.001)
    side.end()


def test_bytes_of_a_step():
    """1.24e9 parameters of two bytes, and 16 layers of 8 heads of 64, twice, for 1025 tokens."""
    step = DecodeWorkload("Llama-3.2-1B", 1, 1024)
    assert abs(step.config.parameters - 1.236e9) < 1e6
    assert step.nbytes == 2 * step.config.parameters + 2 * 2 * 16 * 8 * 64 * 1025
    fewer = DecodeWorkload("Llama-3.2-1B", 1, 1024, "fp8")
    assert fewer.name == "Llama-3.2-1B fp8 batch 1, 1024 tokens"
    assert step.nbytes - fewer.nbytes == step.config.parameters - 128256 * 2048
    whole = DecodeWorkload("Llama-3.1-8B", 8, 1024)
    assert abs(whole.config.parameters - 8.03e9) < 1e7
    assert whole.nbytes == 2 * (whole.config.parameters - 128256 * 4096) + 8 * 2 * 2 * 32 * 8 * 128 * 1025
