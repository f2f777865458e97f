"""The part "moe" of bench/gpu/run.py: our kernels on the emulator, its peers' arithmetic on a CPU."""
from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from bench.gpu import moe as gpu_moe
from bench.gpu.moe_contenders import deep_gemm, pad_groups, torch_grouped_mm, vllm_experts
from bench.gpu.parts import NotMeasured
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.template import GPU

OPTIONS = Namespace(arch="sm_90a", seed=0, emulate=True)
EVERY = {each.name: each for each in gpu_moe.shapes()}


@pytest.mark.parametrize("name", ["layer Qwen3-235B 16 tokens", "down gpt-oss-20b 64 tokens"])
def test_rows_are_right_on_the_emulated_device(name: str):
    row = gpu_moe.run_emulated(EVERY[name], OPTIONS)
    assert row["status"] == "emulated", row


def test_every_row_has_a_kernel_and_a_name_of_its_own():
    assert len(EVERY) == len(list(gpu_moe.shapes())) == 60
    for each in EVERY.values():
        for spec, _ in each.stages: assert choose(spec, GPU("sm_90a", 132)) is not None, each.name


@pytest.mark.parametrize("part", gpu_moe.PARTS)
def test_a_grouped_matmul_of_torch_is_right_and_another_is_found(part: str):
    torch.manual_seed(0)
    workload = EVERY[f"{part} Mixtral 16 tokens"].scale_down()
    given = workload.make_inputs("cpu")
    run = torch_grouped_mm(workload, given, OPTIONS)
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
    assert EVERY["layer Mixtral 4096 tokens"].nbytes > 8 * 2 * 3 * 4096 * 14336


def test_rows_are_padded_to_whole_tiles():
    assert pad_groups([0, 0, 3, 4], 4) == ([0, 1, 2, 4], [1] * 4 + [2] * 4)


def test_peers_say_why_they_do_not_run():
    for part, peer, words in (("down", vllm_experts, "whole layers alone"),
                              ("layer", deep_gemm, "no whole layer")):
        workload = EVERY[f"{part} Mixtral 1 tokens"].scale_down()
        with pytest.raises(NotMeasured, match=words): peer(workload, workload.make_inputs("cpu"), OPTIONS)
