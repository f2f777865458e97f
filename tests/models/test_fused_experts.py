"""Experts that are stored as one tensor a layer: MXFP4 of gpt-oss, and what is refused."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tinygrad import Tensor, dtypes
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.models.families import BASE
from tinygrad_nv import explain
from tinygrad_nv.errors import WeightError
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama

IDS = [int(i) for i in np.random.default_rng(1).integers(3, 320, 40)]
EXPERTS = "model.layers.{}.mlp.experts.{}"
FIELDS = {**BASE, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16}
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def quantised(directory: Path, **changes: int) -> np.ndarray:
    """A random gpt-oss with experts of MXFP4, and transformers' logits of `IDS` in float32."""
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**FIELDS | changes)).eval()
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            stored, own = EXPERTS.format(i, name), getattr(layer.mlp.experts, name)
            experts, inputs, outputs = tensors.pop(stored).shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 125, (experts, outputs, inputs // 32), dtype=torch.uint8)
            tensors |= {f"{stored}_blocks": blocks, f"{stored}_scales": scales}
            own.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIG}))
    with torch.no_grad(): return model(torch.tensor([IDS])).logits.numpy()


def test_experts_of_mxfp4(tmp_path: Path):
    """Each number is transformers' to the bit; logits as test_parity.py has them."""
    expected = quantised(tmp_path)
    config = read_config(tmp_path)
    model = Llama(config, dtypes.float32, "CPU")
    weights.load(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    block = model.blocks[1].feed_forward
    for name, stack in (("down_proj", block.down_stack), ("gate_up_proj", block.gate_up_stack)):
        both = (stored[EXPERTS.format(1, name) + each] for each in ("_blocks", "_scales"))
        theirs = convert_moe_packed_tensors(*both, dtype=torch.float32).transpose(1, 2)
        if name == "gate_up_proj": theirs = torch.cat([theirs[:, ::2], theirs[:, 1::2]], 1)
        assert np.array_equal(stack.matrix.dequantize().numpy().reshape(theirs.shape), theirs.numpy())
    logits = model(Tensor([IDS], dtype=dtypes.int32, device="CPU")).numpy()
    assert np.abs(logits - expected).max() <= 2e-4 * np.abs(expected).max()
    # codes of 4 bits, and a scale of 8 for each 32
    experts = 2 * 5 * 3 * 32 * 64
    assert config.moe.parameters(64) * 2 > experts
    assert weights.nbytes(config, dtypes.bfloat16, tmp_path) == 2 * (config.parameters - experts) \
        + experts * 17 // 32


def test_experts_of_mxfp4_stay_quantised_on_a_gpu(tmp_path: Path):
    """Their matrices are the same to the bit, and both matmuls are kernels that read codes: as near to a
    layer of float32 as bfloat16 is."""
    quantised(tmp_path, num_hidden_layers=1)
    both = {}
    for device, dtype in (("EMU", dtypes.bfloat16), ("CPU", dtypes.float32)):
        model = Llama(read_config(tmp_path), dtype, device)
        weights.load(model, tmp_path)
        both[device] = model.blocks[0].feed_forward
    mine, plain = both["EMU"], both["CPU"]
    for half in ("gate_up_stack", "down_stack"):
        found, wanted = (getattr(each, half).matrix for each in (mine, plain))
        assert found.type.layout == "fragments"
        assert np.array_equal(found.dequantize().numpy(), wanted.dequantize().numpy())
    for name in ("router", "router_bias", "gate_up_bias", "down_bias"):
        getattr(plain, name).replace(getattr(mine, name).to("CPU").float().realize())
    x = Tensor(np.random.default_rng(0).normal(size=(1, 3, 64)), dtype=dtypes.float32, device="CPU")
    x = x.cast(dtypes.bfloat16).realize()
    report = explain(made := mine(x.to("EMU").realize()))
    assert [each.template for each in report.kernels].count("quant_grouped") == 2
    wanted = plain(x.float()).numpy()
    # roundings of logits, of the inner rows, of two results and of their sum
    np.testing.assert_allclose(made.float().numpy(), wanted, atol=3 * 2.0**-8 * np.abs(wanted).max())


def test_experts_that_have_tensors_of_their_own(tmp_path: Path, hf_model: Callable[[str], Path]):
    """As others than transformers write them: the same parameters."""
    source = hf_model("llama4")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        prefix, whole = name.rpartition(".")[0], tensors.pop(name)
        for i, matrix in enumerate(whole.transpose(1, 2)):
            parts = matrix.chunk(2) if "gate_up" in name else [matrix]
            own = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            tensors |= {f"{prefix}.{i}.{one}.weight": part.contiguous()
                        for one, part in zip(own, parts, strict=True)}
    save_file(tensors, tmp_path / "model.safetensors")
    both = [Llama(read_config(directory), dtypes.float32, "CPU") for directory in (source, tmp_path)]
    for model, directory in zip(both, (source, tmp_path), strict=True): weights.load(model, directory)
    for name in ("gate_up", "down"):
        first, second = (getattr(model.blocks[2].feed_forward, name).numpy() for model in both)
        assert np.array_equal(first, second)


def test_missing_and_misshapen_experts_are_listed(tmp_path: Path, hf_model: Callable[[str], Path]):
    source = hf_model("llama4")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    layer = "model.layers.{}.feed_forward.experts.{}"
    def refused(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(WeightError) as found:
            weights.load(Llama(read_config(tmp_path), dtypes.float32, "CPU"), tmp_path)
        return str(found.value)
    name = layer.format(0, "gate_up_proj")
    assert f"{name}: [5, 63, 96], expected [5, 64, 96]" in refused(
        {**tensors, name: tensors[name][:, :-1].contiguous()})
    del tensors[layer.format(2, "down_proj")]
    words = refused(tensors)
    assert "are missing or of another shape" in words
    assert f"{layer.format(2, 'down_proj')} [5, 48, 64]\n" in words


def test_mxfp4_without_scales_is_refused(tmp_path: Path):
    quantised(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[EXPERTS.format(1, "down_proj_scales")]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"experts\.0\.down_proj_scales is missing"):
        weights.load(Llama(read_config(tmp_path), dtypes.float32, "CPU"), tmp_path)
