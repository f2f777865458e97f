"""Directories of random mixtures of experts in a quantised format, and of the weights that they stand for.

`write(kind, family, directory)` makes `directory/quantised` and `directory/plain` of one model: projections
and experts are quantised as `KINDS` of tests/support/quant/directory_case.py says; router, gate of the shared
expert, norms and embedding are not.
"""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.quant.directory_case import KINDS
from tinygrad_nv.models.feed_forward import MixtureOfExperts
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.quantised.experts import names_of

SIZES = {"vocab_size": 320, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "num_experts_per_tok": 2,
         "initializer_range": 0.1}
FAMILIES = {
    "mixtral": ("Mixtral", {"num_local_experts": 5, "intermediate_size": 192}),
    "qwen2-moe": ("Qwen2Moe", {"num_experts": 6, "moe_intermediate_size": 64, "intermediate_size": 128,
                               "shared_expert_intermediate_size": 96, "mlp_only_layers": [1]}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 7, "moe_intermediate_size": 64, "intermediate_size": 128,
                               "head_dim": 32, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {"num_experts": 3, "num_experts_per_tok": 1, "intermediate_size": 64,
                        "num_key_value_heads": 4, "pad_token_id": 0})}
QUANTISED = ("_proj", ".w1", ".w2", ".w3")


def saved(family: str, directory: Path, **changes: object) -> Path:
    """The model in floats."""
    name, fields = FAMILIES[family]
    torch.manual_seed(len(family))
    network = getattr(transformers, f"{name}ForCausalLM")
    model = network(network.config_class(**{**SIZES, **fields, **changes})).float()
    for parameter_name, parameter in model.named_parameters():
        mean = 1.0 if "norm" in parameter_name else 0.0
        if parameter.ndim == 1: torch.nn.init.normal_(parameter, mean, 0.3)
    model.save_pretrained(directory)
    return directory


def write(kind: str, family: str, directory: Path) -> tuple[Path, Path]:
    """The directories of the quantised model and of its plain one."""
    source = saved(family, directory / "source")
    stored, plain = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if not layer.endswith(QUANTISED): stored[name] = plain[name] = weight
        else:
            found, plain[name] = KINDS[kind].quantise(weight)
            stored |= {f"{layer}.{key}": each for key, each in found.items()}
    data = json.loads((source / "config.json").read_text())
    for place, tensors, more in (("quantised", stored, {"quantization_config": KINDS[kind].config}),
                                 ("plain", plain, {})):
        (directory / place).mkdir()
        save_file({name: each.contiguous() for name, each in tensors.items()},
                  directory / place / "model.safetensors", metadata={"format": "pt"})
        (directory / place / "config.json").write_text(json.dumps(data | more))
        (directory / place / "generation_config.json").write_text(
            (source / "generation_config.json").read_text())
    return directory / "quantised", directory / "plain"


def experts(model: Llama) -> dict[str, np.ndarray]:
    """The matrices of all quantised experts, by their names, in float32."""
    made = {}
    for layer, block in enumerate(each.feed_forward for each in model.blocks):
        if not isinstance(block, MixtureOfExperts): continue
        for half, stack in (("gate_up", block.gate_up_stack), ("down", block.down_stack)):
            if stack is None: continue
            names = names_of(model, layer, half)
            made |= dict(zip(names, stack.matrix.dequantize().numpy(), strict=True))
    return made
