"""BERT with rotary positions: NomicBERT (arXiv 2402.01613) and GTE (arXiv 2407.19669), whose feed-forward
halves are gated, and Jina's third embeddings (arXiv 2409.10173).

Tensors have the names of the published files, which transformers writes, too. nomic-embed's own config.json
has GPT-2's names of fields.
"""
from __future__ import annotations

from typing import Any

from tinygrad_nv.errors import ModelError

from ..fields import Fields
from ..rope_fields import rope_config, rope_parameters
from .encoder import BERT_DEFAULTS, ROBERTA_HEAD, EncoderFamily, EncoderNames

NOMIC_NAMES = EncoderNames(
    ("nomic_bert.", "bert."), embedding_norm="emb_ln", layer="encoder.layers.{}", qkv=("attn.Wqkv",),
    output="attn.out_proj", attention_norm="norm1", up=("mlp.fc12", "mlp.fc11"), down="mlp.fc2", norm="norm2")
GTE_NAMES = EncoderNames(
    ("gte.", "new."), qkv=("attention.qkv_proj",), output="attention.o_proj", attention_norm="attn_ln",
    up=("mlp.up_gate_proj",), down="mlp.down_proj", norm="mlp_ln")
JINA_NAMES = EncoderNames(
    ("jina_embeddings_v3.", "roberta."), embedding_norm="emb_ln", layer="encoder.layers.{}",
    qkv=("mixer.Wqkv",), output="mixer.out_proj", attention_norm="norm1", up=("mlp.fc1",), down="mlp.fc2",
    norm="norm2")


def rotary(f: Fields) -> dict[str, Any]:
    """Heads, and a rope that is the same in all layers. Raises `ModelError`."""
    hidden, heads = f.positive("hidden_size"), f.positive("num_attention_heads")
    if f.get("head_dim") is None and hidden % heads:
        raise ModelError(f"{f.name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}",
                         "a multiple, or an explicit head_dim", "correct the file, or download it again")
    head_dim = hidden // heads if f.get("head_dim") is None else f.positive("head_dim")
    rope = rope_config(f, rope_parameters(f), head_dim)
    return {"head_dim": head_dim, "ropes": (rope,) * f.positive("num_hidden_layers")}


def nomic(f: Fields) -> dict[str, Any]:
    """Returns the fields of `EncoderConfig` for Nomic's models. Raises `ModelError`."""
    return {**rotary(f), "gated": True, "biases": frozenset({"norm"})}


def gte(f: Fields) -> dict[str, Any]:
    """Returns the fields of `EncoderConfig` for GTE. Raises `ModelError`."""
    return {**rotary(f), "gated": True, "gate_last": True,
            "biases": frozenset({"qkv", "output", "down", "norm"})}


NOMIC = EncoderFamily(
    {**BERT_DEFAULTS, "vocab_size": 30528, "hidden_act": "silu", "max_position_embeddings": 2048,
     "rope_theta": 1000.0}, NOMIC_NAMES, nomic,
    {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
     "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
     "layer_norm_eps": "layer_norm_epsilon", "rope_theta": "rotary_emb_base"},
    {"activation_function": ("swiglu",), "rotary_emb_fraction": (1, 1.0), "rotary_emb_interleaved": (False,),
     "rotary_scaling_factor": (), "prenorm": (False,), "qkv_proj_bias": (False,), "mlp_fc1_bias": (False,),
     "mlp_fc2_bias": (False,), "use_rms_norm": (False,), "parallel_block": (False,), "causal": (False,),
     "moe_every_n_layers": (0,), "scale_attn_weights": (True,)})
GTE = EncoderFamily(
    {**BERT_DEFAULTS, "vocab_size": 250_048, "max_position_embeddings": 8192, "type_vocab_size": 1,
     "rope_theta": 160_000.0}, GTE_NAMES, gte)
JINA = EncoderFamily(
    {**BERT_DEFAULTS, "vocab_size": 250_002, "hidden_size": 1024, "num_hidden_layers": 24,
     "num_attention_heads": 16, "intermediate_size": 4096, "max_position_embeddings": 8194,
     "type_vocab_size": 1, "layer_norm_eps": 1e-5, "rope_theta": 20_000.0}, JINA_NAMES, rotary,
    head=ROBERTA_HEAD)
FAMILIES = {"NomicBert": NOMIC, "Gte": GTE, "JinaEmbeddingsV3": JINA}
