"""DEV=EMU: experts of FP8 blocks multiply codes on an H100, and give the numbers of rounded inputs."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.quant.directory_case import KINDS
from tinygrad_nv import Tensor, dtypes, explain
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.feed_forward import MixtureOfExperts
from tinygrad_nv.models.llama import Llama

HIDDEN, TOKENS = 256, 5
FIELDS = {"vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": 1,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 3,
          "num_experts_per_tok": 2, "max_position_embeddings": 32, "initializer_range": 0.1}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None: monkeypatch.setenv("EMU_ARCH", "sm_90a")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral whose experts are of FP8 blocks, as DeepSeek-V3's are stored."""
    out = tmp_path_factory.mktemp("fp8")
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**FIELDS)).save_pretrained(out)
    stored = dict[str, torch.Tensor]()
    for name, weight in load_file(out / "model.safetensors").items():
        if ".experts." not in name: stored[name] = weight
        else:
            made, _ = KINDS["fp8"].quantise(weight)
            stored |= {f"{name.removesuffix('.weight')}.{key}": each for key, each in made.items()}
    save_file({name: each.contiguous() for name, each in stored.items()}, out / "model.safetensors",
              metadata={"format": "pt"})
    data = json.loads((out / "config.json").read_text())
    attention = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
    config = {**KINDS["fp8"].config, "modules_to_not_convert": [*attention, "lm_head"]}
    (out / "config.json").write_text(json.dumps({**data, "quantization_config": config}))
    return out


def experts(directory: Path, device: str, dtype: object) -> MixtureOfExperts:
    model = Llama(read_config(directory), dtype, device)  # type: ignore[arg-type]
    weights.load(model, directory)
    made = model.blocks[0].feed_forward
    assert isinstance(made, MixtureOfExperts)
    return made


def test_codes_of_experts_are_multiplied(directory: Path):
    """Matrices keep the scales of their blocks. Elsewhere inputs are not rounded, and matrices have scales of
    rows."""
    ours, theirs = experts(directory, "EMU:90", dtypes.bfloat16), experts(directory, "CPU", dtypes.float32)
    for name in ("gate_up_stack", "down_stack"):
        stack, other = getattr(ours, name), getattr(theirs, name)
        assert (stack.codes, str(stack.matrix.type)) == (True, "e4m3 128x128")
        assert (other.codes, other.activations) == (False, None)
        np.testing.assert_array_equal(stack.matrix.dequantize().numpy(), other.matrix.dequantize().numpy())
        setattr(theirs, name, replace(other, activations=stack.activations))
    x = np.random.default_rng(1).standard_normal((1, TOKENS, HIDDEN)).astype(np.float32)
    x = np.array(Tensor(x, device="CPU").cast(dtypes.bfloat16).float().numpy())
    made = ours(Tensor(x, device="EMU:90").cast(dtypes.bfloat16).realize())
    kernels = [each for each in explain(made).kernels if each.template in ("quantize", "grouped_gemm")]
    assert [each.template for each in kernels] == ["quantize", "grouped_gemm"] * 2
    assert all(each.schedule is not None and each.schedule.template == "grouped_scaled_wgmma"
               for each in kernels[1::2])
    wanted = theirs(Tensor(x, device="CPU")).numpy()
    # the inner rows are rounded to bfloat16, so that some codes are others, an eighth away; then the results
    assert np.abs(made.float().numpy() - wanted).max() <= 0.03 * np.abs(wanted).max()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("device", "arch", "dtype"), [("EMU:80", "sm_80", dtypes.bfloat16),
                                                       ("EMU:90", "sm_90a", dtypes.float32)])
def test_where_there_is_no_kernel(directory: Path, device: str, arch: str, dtype: object,
                                  monkeypatch: pytest.MonkeyPatch):
    """Other GPUs, and results of float32: matrices are dequantised while they are multiplied."""
    monkeypatch.setenv("EMU_ARCH", arch)
    stack = experts(directory, device, dtype).down_stack
    assert stack is not None
    assert (stack.codes, stack.activations) == (False, None)
