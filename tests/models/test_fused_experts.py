"""Experts that are stored as one tensor a layer: MXFP4 of gpt-oss, and what is refused."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from families import BASE
from safetensors.torch import load_file, save_file
from tinygrad import Tensor, dtypes
from tinygrad_nv.models import mxfp4, weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tinygrad_nv.errors import WeightError

IDS = [int(i) for i in np.random.default_rng(1).integers(3, 320, 40)]
EXPERTS = "model.layers.{}.mlp.experts.{}"
FIELDS = {**BASE, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16}
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def quantised(directory: Path) -> np.ndarray:
    """A random gpt-oss with experts of MXFP4, and transformers' logits of `IDS` in float32."""
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**FIELDS)).eval()
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
    for name, ours in (("down_proj", model.blocks[1].feed_forward.down),
                       ("gate_up_proj", model.blocks[1].feed_forward.gate_up)):
        both = (stored[EXPERTS.format(1, name) + each] for each in ("_blocks", "_scales"))
        theirs = convert_moe_packed_tensors(*both, dtype=torch.float32).transpose(1, 2)
        if name == "gate_up_proj": theirs = torch.cat([theirs[:, ::2], theirs[:, 1::2]], 1)
        assert np.array_equal(ours.numpy(), theirs.reshape(ours.shape).numpy())
    logits = model(Tensor([IDS], dtype=dtypes.int32, device="CPU")).numpy()
    assert np.abs(logits - expected).max() <= 2e-4 * np.abs(expected).max()
    assert weights.nbytes(config, dtypes.bfloat16, tmp_path) == 2 * config.parameters


def test_every_code_and_scale():
    """As transformers has them in bfloat16, also beyond its range."""
    codes = np.arange(256, dtype=np.uint8).repeat(16).reshape(256, 16)
    for exponent in (0, 1, 127, 200, 253):
        scales = np.full((256, 1), exponent, np.uint8)
        theirs = convert_moe_packed_tensors(torch.from_numpy(codes)[None, :, None],
                                            torch.from_numpy(scales)[None])
        found = torch.from_numpy(mxfp4.numbers(codes, scales, 32).view(np.int16)).view(torch.bfloat16)
        assert torch.equal(found, theirs[0].T), exponent


def test_missing_and_misshapen_experts_are_listed(tmp_path: Path, hf_model: Callable[[str], Path]):
    source = hf_model("llama4")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    layer = "model.layers.{}.feed_forward.experts.{}"
    del tensors[layer.format(2, "down_proj")]
    tensors[layer.format(0, "gate_up_proj")] = tensors[layer.format(0, "gate_up_proj")][:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError) as found:
        weights.load(Llama(read_config(tmp_path), dtypes.float32, "CPU"), tmp_path)
    assert "are missing or of another shape" in str(found.value)
    assert f"{layer.format(0, 'gate_up_proj')} [5, 64, 96]: found float32 [5, 63, 96]" in str(found.value)
    assert f"{layer.format(2, 'down_proj')} [5, 48, 64]\n" in str(found.value)


def test_mxfp4_without_scales_is_refused(tmp_path: Path):
    quantised(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[EXPERTS.format(1, "down_proj_scales")]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"experts\.down_proj_scales \[5, 64, 1\]"):
        weights.load(Llama(read_config(tmp_path), dtypes.float32, "CPU"), tmp_path)
