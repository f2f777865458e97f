"""LFM2 (arXiv 2511.23404): gated short convolutions in most layers, attention with norms of each head's
queries and keys in the others. LFM2-MoE: experts chosen by sigmoids with a bias in all but the first layers.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from tinygrad_nv.errors import ModelError, brief

from ..fields import Fields
from ..layer_config import COUNTS, Names, moe_config
from ..mixers.config import ShortConvConfig
from .family import FULL, Family

CONV = "conv"
NAMES = Names(attention_norm="operator_norm", feed_forward_norm="ffn_norm", output="self_attn.out_proj",
              q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm",
              gate_up=("feed_forward.w1", "feed_forward.w3"), down="feed_forward.w2",
              router="feed_forward.gate", choice_bias="feed_forward.expert_bias",
              expert="feed_forward.experts.{}", expert_matrices=("w1", "w3", "w2"),
              last_norm="model.embedding_norm")


def lfm2(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for LFM2."""
    if (taps := f.positive("conv_L_cache")) < 2:
        raise ModelError(f"{f.name}: conv_L_cache is {taps}", "at least 2")
    own = ShortConvConfig(f.positive("hidden_size"), taps, f.flag("conv_bias"))
    kinds = list_kinds(f, (FULL, CONV))
    tied = "tie_word_embeddings" if f.get("tie_embedding") is None else "tie_embedding"
    return {"mixers": tuple(own if kind == CONV else None for kind in kinds), "names": NAMES,
            "qk_norm": "head", "qkv_bias": False, "output_bias": False, "activation": "silu",
            "intermediate_size": feed_forward_width(f),
            "norm_eps": f.number("norm_eps"), "tied": f.flag(tied)}


def list_kinds(f: Fields, known: tuple[str, ...]) -> list[str]:
    """Each layer's kind, one of `known`: layer_types, or full_attn_idxs. Raises `ModelError`."""
    layers = f.positive("num_hidden_layers")
    if f.get("layer_types") is None:
        full = range(layers) if f.get("full_attn_idxs") is None else f.layers("full_attn_idxs")
        return [FULL if i in full else CONV for i in range(layers)]
    kinds: list[str] = f.each_layer("layer_types")
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ModelError(f"{f.name}: layer_types has {brief(unknown[0])}, which is not supported",
                         " or ".join(known))
    return kinds


def feed_forward_width(f: Fields) -> int:
    """Columns between the two matrices of a feed-forward."""
    width = f.positive("block_ff_dim" if f.get("block_ff_dim") is not None else "intermediate_size")
    if not f.flag("block_auto_adjust_ff_dim"): return width
    width, step = int(2 * width / 3), f.positive("block_multiple_of")
    factor = f.optional("block_ffn_dim_multiplier")
    return width if factor is None else -(-int(factor * width) // step) * step


LFM2 = Family("Lfm2ForCausalLM", {"vocab_size": 65_536, "hidden_size": 2560, "intermediate_size": 12_288,
                                  "num_hidden_layers": 32, "num_attention_heads": 32,
                                  "num_key_value_heads": 8, "max_position_embeddings": 128_000,
                                  "norm_eps": 1e-5, "rope_theta": 1_000_000.0, "conv_L_cache": 3,
                                  "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
                                  "block_auto_adjust_ff_dim": True, "tie_word_embeddings": True},
              settings=lfm2)


def lfm2_moe(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for LFM2-MoE."""
    first, layers = f.count("num_dense_layers", 0), f.positive("num_hidden_layers")
    moe = moe_config(f, 32, "moe_intermediate_size", [i >= first for i in range(layers)],
                     renormalize=f.flag("norm_topk_prob"), score="sigmoid",
                     choice_bias=f.flag("use_expert_bias"))
    moe = replace(moe, policy=replace(moe.policy, scale=f.number("routed_scaling_factor")))
    made = lfm2(f.within({"block_auto_adjust_ff_dim": False}))
    return {**made, "moe": moe if first < layers else None}


LFM2_MOE = Family("Lfm2MoeForCausalLM",
                  {**LFM2.defaults, "hidden_size": 2048, "intermediate_size": 7168,
                   "moe_intermediate_size": 1792, "num_dense_layers": 2, "num_experts_per_tok": 4,
                   "use_expert_bias": True, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
                  frozenset(COUNTS), lfm2_moe)
