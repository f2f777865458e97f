"""Metadata of a GGUF file as fields of config.json."""
from __future__ import annotations

from typing import Any

from tinygrad_nv.errors import ModelError, brief
from tinygrad_nv.quant.gguf.file import GGUFFile

from .architecture import AGAIN, USE, Architecture, Metadata, rope_scaling
from .architectures import architecture_of
from .tensors import EMBEDDING, HEAD, heads_to_reorder, types

# keys after the architecture's name, as config.json calls them
REQUIRED = {"context_length": "max_position_embeddings", "embedding_length": "hidden_size",
            "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
            "attention.head_count": "num_attention_heads",
            "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
# and those that config.py knows, or refuses
OPTIONAL = {"attention.head_count_kv": "num_key_value_heads", "rope.freq_base": "rope_theta",
            "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "attention.clamp_kqv": "clip_qkv", "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping", "attention.scale": "attention_multiplier",
            "logit_scale": "logits_scaling", "residual_scale": "residual_multiplier",
            "embedding_scale": "embedding_multiplier", "attention.causal": "is_causal"}
READ = frozenset({"attention.key_length", "attention.value_length", "rope.dimension_count",
                  "rope.scale_linear"})
# Keys that change what is computed begin or end so. Those that an architecture does not read must have one
# of the values that change nothing; no value of those in `HARMLESS` does.
CHANGING = ("attention.", "rope.", "expert_"), ("_scale", "softcapping")
NEUTRAL = {"expert_weights_scale": (0.0, 1.0), "expert_gating_func": (1,), "expert_group_count": (0, 1),
           "expert_group_used_count": (0, 1), "attention.sliding_window": (0,)}
HARMLESS = frozenset({"attention.layer_norm_epsilon", "expert_shared_count"})
END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Texts of tokens that end an answer, in chats; files of most models have only eos_token_id. NORMAL ones are
# text.
ENDS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>",
                  "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|eot|>"})
HARMONY = frozenset({"<|return|>", "<|call|>"})     # where these are, <|end|> ends a message of several
NORMAL = 1


def config_of(file: GGUFFile) -> dict[str, Any]:
    """Returns what config.json would be. Raises `ModelError` for an architecture that is not implemented, or
    for metadata that are missing or not implemented."""
    architecture, kind = architecture_of(file), str(file.metadata["general.architecture"])
    own = {key.removeprefix(f"{kind}."): value for key, value in file.metadata.items()
           if key.startswith(f"{kind}.")}
    m = Metadata(file, kind, own)
    if missing := [key for key in REQUIRED if key not in own]:
        raise ModelError(f"{file.path} has no {kind}.{missing[0]}", "the metadata that llama.cpp writes",
                         AGAIN)
    keys = REQUIRED | OPTIONAL | dict(architecture.keys)
    _require_read(m, architecture, {*keys, *READ, *architecture.reads})
    made = {name: m.get(key) for key, name in keys.items()
            if key in own and not (key.endswith("_scale") and own[key] == 1.0)}
    made.setdefault("num_key_value_heads", made["num_attention_heads"])
    made |= {"architectures": [architecture.family], "tie_word_embeddings": HEAD not in file.tensors,
             "vocab_size": _vocabulary(m), "eos_token_id": _end_tokens(file),
             "attention_bias": any(f"blk.0.{part}.bias" in file.tensors for part in ("attn_q", "attn_qkv")),
             "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}
    made |= dict(architecture.fixed) | architecture.settings(m)
    if architecture.whole_heads: made["head_dim"] = _head_dim(m)
    if "rope_scaling" not in made: made["rope_scaling"] = rope_scaling(m)
    if found := types(file):
        made["quantization_config"] = {"quant_method": "gguf", "types": found,
                                       "heads": heads_to_reorder(file)}
    return made


def _require_read(m: Metadata, architecture: Architecture, known: set[str]) -> None:
    """Refuses metadata by name that change what is computed."""
    (starts, ends), neutral = CHANGING, dict[str, tuple[Any, ...]](NEUTRAL)
    if "norm_topk_prob" in architecture.fixed:
        neutral["expert_weights_norm"] = (architecture.fixed["norm_topk_prob"],)
    for key, value in m.own.items():
        if key in known or key in HARMLESS or key.startswith("rope.scaling."): continue
        if not key.startswith(starts) and not key.endswith(ends): continue
        if value not in (same := neutral.get(key, ())):
            raise m.refusal(key, " or ".join(map(str, same)) or "a model without it")


def _vocabulary(m: Metadata) -> Any:
    embedding = m.file.tensors.get(EMBEDDING)
    return m.own.get("vocab_size") if embedding is None else embedding.shape[0]


def _end_tokens(file: GGUFFile) -> list[Any]:
    """Returns the end tokens that metadata name, and those that end an answer by their text."""
    found = [file.metadata.get(f"tokenizer.ggml.{key}") for key in END_TOKENS]
    tokens, types = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(types, list):
        named = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
                 if kind != NORMAL and token in ENDS}
        if named.keys() >= HARMONY: named.pop("<|end|>", None)
        found += named.values()
    return list(dict.fromkeys(token for token in found if token is not None))


def _head_dim(m: Metadata) -> Any:
    dim = m.head_dim
    for key in ("attention.value_length", "rope.dimension_count"):
        if m.own.get(key) not in (None, dim):
            raise ModelError(f"{m.file.path}: {key} is {brief(m.own[key])}, and heads have {brief(dim)} "
                             "elements", "values as long as keys, all of which are rotated", USE)
    return dim
