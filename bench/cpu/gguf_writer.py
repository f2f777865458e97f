"""The weights of a Hugging Face directory of a Llama, Mixtral or Qwen3-MoE as a GGUF file without a
tokenizer: ids go in and out.

Protocol: `write(directory, path, dtype)`. GGUF's llama rotates neighbouring elements of a head where Hugging
Face's rotates the halves, so that rows of the projections of q and k change places (as llama.cpp's own
conversion does).
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

KINDS = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16,
         "float16": gguf.GGMLQuantizationType.F16}
# names of a layer's weights there and here
LAYER = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
         "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj"}
DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
# of mixtures: of llama.cpp's architecture, where experts are, and their matrices
EXPERTS = {"mixtral": ("llama", "block_sparse_moe", ("w1", "w3", "w2")),
           "qwen3_moe": ("qwen3moe", "mlp", ("gate_proj", "up_proj", "down_proj"))}


def write(directory: Path, path: Path, dtype: str) -> None:
    """The weights as GGUF: norms in float32, the others in `dtype`."""
    config = json.loads((directory / "config.json").read_text())
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")): weights.update(load_file(file))
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    kind_of_model = EXPERTS.get(config["model_type"])
    architecture = "llama" if kind_of_model is None else kind_of_model[0]
    writer = gguf.GGUFWriter(path, architecture)
    describe(writer, config)
    for there, here in names_of(config).items():
        some = [weights[f"{name}.weight"].float().numpy() for name in here]
        weight = some[0] if "_exps" not in there else np.stack(some)
        if there.endswith("attn_q") and architecture == "llama": weight = pair_rows(weight, heads)
        if there.endswith("attn_k") and architecture == "llama": weight = pair_rows(weight, kv)
        # llama.cpp keeps routers in float32
        kind = KINDS[dtype] if weight.ndim > 1 and not there.endswith("_inp") else KINDS["float32"]
        writer.add_tensor(f"{there}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def names_of(config: dict[str, Any]) -> dict[str, list[str]]:
    """Names there, and those here: of the matrices of experts several."""
    names = {"token_embd": ["model.embed_tokens"], "output_norm": ["model.norm"]}
    if not config["tie_word_embeddings"]: names["output"] = ["lm_head"]
    mixture = EXPERTS.get(config["model_type"])
    layer = LAYER | (DENSE if mixture is None else {"ffn_gate_inp": f"{mixture[1]}.gate"})
    if config["model_type"] == "qwen3_moe":
        layer |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
    for i in range(config["num_hidden_layers"]):
        names |= {f"blk.{i}.{there}": [f"model.layers.{i}.{here}"] for there, here in layer.items()}
        if mixture is None: continue
        count = config.get("num_local_experts") or config["num_experts"]
        for there, here in zip(("gate", "up", "down"), mixture[2], strict=True):
            names[f"blk.{i}.ffn_{there}_exps"] = [
                f"model.layers.{i}.{mixture[1]}.experts.{e}.{here}" for e in range(count)]
    return names


def describe(writer: Any, config: dict[str, Any]) -> None:
    """Writes the metadata that llama.cpp must know of the model."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if config["model_type"] in EXPERTS:
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if width := config.get("moe_intermediate_size"): writer.add_expert_feed_forward_length(width)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def pair_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head, [2, half], as [half, 2]."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)
