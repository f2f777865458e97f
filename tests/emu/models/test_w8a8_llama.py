"""DEV=EMU: W8A8 and FP8 checkpoints multiply codes on GPUs, with one pass between matmuls, and W8A8 on CPUs,
and give the logits of rounded inputs."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tinygrad_nv import SamplingParams, Tensor, dtypes, explain
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.explain import Lowering
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.quant.activations import QWeight

IDS = [5, 17, 80, 33, 2]
# of the largest number: of the first matmul, whose inputs are the same, and of logits. A sum of e4m3 that is
# a unit of 2^-13 off lets a few codes of the next inputs be others, an eighth away
NEAR, LOGITS = 5e-4, {"w8a8": 1e-3, "fp8": 0.05, "fp8-block": 0.05}


@pytest.fixture(scope="module")
def source(make_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer of bfloat16, whose matrices are several blocks wide."""
    out = tmp_path_factory.mktemp("source")
    model = AutoModelForCausalLM.from_pretrained(make_model(
        hidden_size=256, intermediate_size=256, num_hidden_layers=1))
    model.to(torch.bfloat16).save_pretrained(out)
    return out


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None: monkeypatch.setenv("EMU_ARCH", "sm_90a")


def opened(directory: Path, device: str) -> Llama:
    model = Llama(read_config(directory), dtypes.float32, device)
    weights.load(model, directory)
    return model


def tokens(model: Llama) -> Tensor: return Tensor([IDS], dtype=dtypes.int32, device=model.device)


def first(model: Llama) -> Tensor:
    """The first matmul."""
    block = model.blocks[0]
    return block.attention.qkv(block.attention_norm(model.embed(tokens(model))))


def off(found: Tensor, wanted: Tensor) -> float:
    """The largest error, of the largest number."""
    exact = wanted.numpy()
    return float(np.abs(found.numpy() - exact).max() / np.abs(exact).max())


def multiplied(told: Lowering) -> list[str]:
    """The kernels of codes, in their order."""
    words = ("quantize", "wgmma", "scaled_wgmma", "mma", "gemv")
    return [str(each.template) for each in told.kernels if each.template in words]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["w8a8", "fp8", "fp8-block"])
def test_codes_are_multiplied_on_a_gpu(command, source: Path, tmp_path: Path, scheme: str):
    out = tmp_path / "made"
    command("quantize", source, "--scheme", scheme, "--out", out).succeeded()
    on_gpu, on_cpu = opened(out, "EMU:90"), opened(out, "CPU")
    linears = [on_gpu.blocks[0].attention.qkv, on_gpu.blocks[0].feed_forward.gate_up]
    assert all(len(each.parts) == 1 and isinstance(each.parts[0], QWeight) and each.parts[0].codes
               for each in linears)
    # a CPU multiplies codes of int8
    assert all(isinstance(part, QWeight) and part.codes == (scheme == "w8a8")
               for part in on_cpu.blocks[0].attention.qkv.parts)
    made = on_gpu(tokens(on_gpu))
    kernels = multiplied(told := explain(made))
    assert kernels.count("quantize") == 4, told
    # between the matmuls of gate | up and of down there is one pass, which makes codes
    last = len(kernels) - 1 - kernels[::-1].index("quantize")
    assert kernels[last - 2:last + 2:2] == ["quantize", "quantize"]
    assert off(made, on_cpu(tokens(on_cpu))) <= LOGITS[scheme]
    assert off(first(on_gpu), first(on_cpu)) <= NEAR


@pytest.mark.slow
def test_codes_on_a_cpu_are_rounded_inputs(command, source: Path, tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch):
    """The same numbers, of which sums are exact: the first matmul differs by float32's roundings alone."""
    out = tmp_path / "made"
    command("quantize", source, "--scheme", "w8a8", "--out", out).succeeded()
    codes = opened(out, "CPU")
    made = codes(tokens(codes))
    kernels = [each.template for each in explain(made).kernels]
    assert kernels.count("quantize") == 4
    assert kernels.count("codes_dots") == 4
    monkeypatch.setenv("NV_GEMM", "0")
    rounded = opened(out, "CPU")
    assert not any(isinstance(part, QWeight) and part.codes for part in rounded.blocks[0].attention.qkv.parts)
    assert off(made, rounded(tokens(rounded))) <= LOGITS["w8a8"]
    assert off(first(codes), first(rounded)) <= 2.0 ** -20


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["w8a8", "fp8"])
def test_greedy_tokens_of_the_engine_are_those_of_a_cpu(command, source: Path, tmp_path: Path, scheme: str):
    """Two requests in one batch, over pages, by captured steps."""
    out, found = tmp_path / "made", list[list[list[int]]]()
    command("quantize", source, "--scheme", scheme, "--out", out).succeeded()
    for device in ("EMU:90", "CPU"):
        llm = LLM(out, device=device, max_num_seqs=2, max_model_len=32, dtype="float32")
        made = llm.generate([IDS, IDS[:3]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        found.append([list(each.token_ids) for each in made])
        llm.close()
    assert found[0] == found[1]


def test_blocks_of_quant_method_fp8(command, source: Path, tmp_path: Path):
    """As DeepSeek and Qwen write them: inputs are rounded on GPUs, on CPUs they are not."""
    out = tmp_path / "made"
    command("quantize", source, "--scheme", "fp8-block", "--format", "fp8", "--out", out).succeeded()
    (on_gpu,), (on_cpu,) = (opened(out, name).blocks[0].attention.qkv.parts for name in ("EMU:90", "CPU"))
    assert isinstance(on_gpu, QWeight)
    assert isinstance(on_cpu, QWeight)
    assert on_gpu.codes
    assert on_gpu.activations is not None
    assert not on_cpu.codes
    assert on_cpu.activations is None


@pytest.mark.slow
def test_blocks_are_multiplied_on_an_l40s(command, source: Path, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch):
    """By mma.sync of 8-bit floats; codes of the same inputs are the same on a CPU, which rounds them, too."""
    monkeypatch.setenv("EMU_ARCH", "sm_89")
    out = tmp_path / "made"
    command("quantize", source, "--scheme", "fp8-block", "--out", out).succeeded()
    on_gpu, on_cpu = opened(out, "EMU:89"), opened(out, "CPU")
    made = on_gpu(tokens(on_gpu))
    kernels = [each.template for each in explain(made).kernels]
    assert (kernels.count("quantize"), kernels.count("scaled_mma")) == (4, 4)
    assert off(made, on_cpu(tokens(on_cpu))) <= LOGITS["fp8-block"]
    assert off(first(on_gpu), first(on_cpu)) <= NEAR


def test_static_scales_of_tensors(command, source: Path, tmp_path: Path):
    """As ModelOpt and AutoFP8 write them: matrices with a scale each become one with scales of rows."""
    out, tensors = tmp_path / "made", load_file(source / "model.safetensors")
    out.mkdir()
    for name, each in list(tensors.items()):
        if not name.endswith("_proj.weight"): continue
        scale = each.float().abs().max() / 448
        tensors[name] = (each.float() / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
        tensors[name.replace(".weight", ".input_scale")] = torch.tensor(0.05)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    data = json.loads((source / "config.json").read_text())
    data["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static",
                                   "weight_block_size": None}
    (out / "config.json").write_text(json.dumps(data))
    model = opened(out, "EMU:90")
    (part,) = model.blocks[0].attention.qkv.parts
    assert isinstance(part, QWeight)
    assert str(part.matrix.type) == "e4m3 channel"
    made = model(tokens(model))
    # those of down's input are made by the matmul of gate | up
    kernels = multiplied(told := explain(made))
    assert kernels.count("quantize") == 3
    last = len(kernels) - 1 - kernels[::-1].index("quantize")
    assert kernels[last + 1:last + 3] == ["gemv", "gemv"]
    assert "→ e4m3, 2 parts" in str(told)
    on_cpu = opened(out, "CPU")
    others = on_cpu.blocks[0].attention.qkv
    others.parts = tuple(replace(each, activations=part.activations, input_scale=part.input_scale)
                         for each in others.parts if isinstance(each, QWeight))
    assert off(first(model), first(on_cpu)) <= NEAR
