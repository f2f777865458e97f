"""Llama 4, what reads text: chunks of keys in layers with rope, all keys in those without, whose queries
have a temperature; queries and keys normalised without a weight; experts, whose inputs are multiplied by the
router's sigmoid, and a shared one in the layers that moe_layers says.
"""
from __future__ import annotations

from typing import Any

from tinygrad_nv.errors import ModelError, brief

from ..fields import Fields
from ..layer_config import COUNTS, Names, Temperature, moe_config
from ..rope import attention_factor, rope_config, rope_parameters
from .family import FULL, Family, has_rope

NAMES = Names(gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj",
              router="feed_forward.router", expert="feed_forward.experts.{}", fused="halves",
              fused_tensors=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
              shared_expert="feed_forward.shared_expert")
CHUNKED = "chunked_attention"


def mixtures(f: Fields) -> list[bool]:
    """For each layer whether it has experts. Raises `ModelError`."""
    layers = range(f.positive("num_hidden_layers"))
    if f.get("moe_layers") is None:
        step = f.positive("interleave_moe_layer_step")
        return [(i + 1) % step == 0 for i in layers]
    listed = f.layers("moe_layers")
    return [i in listed for i in layers]


def chunks(f: Fields, ropes: list[bool]) -> tuple[int | None, ...]:
    """The size of each layer's chunks of keys, None where a token sees all. Raises `ModelError`."""
    size = None if f.get("attention_chunk_size") is None else f.positive("attention_chunk_size")
    types = [CHUNKED if rope and size is not None else FULL for rope in ropes]
    if f.get("layer_types") is not None: types = f.each_layer("layer_types")
    known = (FULL,) if size is None else (FULL, CHUNKED)
    if unknown := [kind for kind in types if kind not in known]:
        raise ModelError(f"{f.name}: layer_types has {brief(unknown[0])}, attention_chunk_size is {size}",
                         f"{FULL}, or {CHUNKED} with an attention_chunk_size")
    return tuple(size if kind == CHUNKED else None for kind in types)


def settings(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig`."""
    ropes, normalised = has_rope(f), f.flag("use_qk_norm")
    rope = rope_config(f, rope_parameters(f), f.positive("head_dim"))
    if normalised and attention_factor(rope) != 1:
        raise ModelError(f"{f.name}: rope type {rope.kind!r} scales queries, which use_qk_norm normalises",
                         "a rope that only rotates", "use a model of this family as it was published")
    moe = moe_config(f, 16, "intermediate_size", mixtures(f), f.positive("intermediate_size"),
                     renormalize=False, score="chosen_sigmoid", scaled_inputs=True)
    tempered = Temperature(f.number("floor_scale"), f.number("attn_scale")) \
        if f.flag("attn_temperature_tuning") else None
    return {"names": NAMES, "intermediate_size": f.positive("intermediate_size_mlp"), "moe": moe,
            "windows": chunks(f, ropes), "chunked": True, "rope_interleaved": True,
            "ropes": tuple(rope if each else None for each in ropes),
            "qk_norm": "unit" if normalised else "", "temperature": tempered}


FAMILY = Family("Llama4ForCausalLM",
                {"vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192,
                 "num_hidden_layers": 48, "num_attention_heads": 40, "max_position_embeddings": 131_072,
                 "num_key_value_heads": 8, "head_dim": 128, "intermediate_size_mlp": 16_384,
                 "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "use_qk_norm": True,
                 "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attn_temperature_tuning": True,
                 "floor_scale": 8192, "attn_scale": 0.1, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
                frozenset(COUNTS), settings)
