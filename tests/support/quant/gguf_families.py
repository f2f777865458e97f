"""What llama.cpp's converter writes of families beyond LLaMA's: metadata after the architecture's name, and
tensors by its names. `CONVERTERS` has them by the architecture of config.json; names are those of the package
`gguf`."""
from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

Config, Tensors = dict[str, Any], dict[str, np.ndarray]
FULL, SLIDING = "full_attention", "sliding_attention"
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def common(config: Config) -> dict[str, Any]:
    """What is written of any model."""
    ropes = config.get("rope_parameters") or {}
    rope = ropes.get(FULL, ropes)
    made = {"block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
            "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "rope.freq_base": float(rope["rope_theta"])}
    if rope.get("rope_type") in ("linear", "yarn"):
        made |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        made["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        made |= {f"rope.scaling.yarn_{key}": float(rope[key]) for key in ("beta_fast", "beta_slow")
                 if rope.get(key) is not None}
        if rope.get("attention_factor"): made["rope.scaling.yarn_attn_factor"] = rope["attention_factor"]
    if SLIDING in ropes: made["rope.freq_base_swa"] = float(ropes[SLIDING]["rope_theta"])
    experts = config.get("num_local_experts") or config.get("n_routed_experts")
    if experts: made |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
    for key, there in (("n_group", "expert_group_count"), ("topk_group", "expert_group_used_count")):
        if config.get(key): made[there] = config[key]
    if config.get("head_dim"):
        made |= {f"attention.{key}_length": config["head_dim"] for key in ("key", "value")}
    return made


def same(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors as they are."""
    yield from tensors.items()


def raised(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """1 is added to norms."""
    for name, tensor in tensors.items(): yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def neighbours(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """What rope rotates together are neighbours."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        count = heads.get(name.split(".")[-2])
        if count:
            halves = tensor.reshape(count, 2, -1, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        yield name, tensor


def gemma2(config: Config) -> dict[str, Any]:
    return {"attn_logit_softcapping": config["attn_logit_softcapping"],
            "final_logit_softcapping": config["final_logit_softcapping"],
            "attention.sliding_window": config["sliding_window"], "rope.freq_base": None}


def gemma3(config: Config) -> dict[str, Any]:
    made = {"attention.sliding_window": config["sliding_window"]}
    if config.get("final_logit_softcapping"):
        made["final_logit_softcapping"] = config["final_logit_softcapping"]
    return made


def gpt_oss(config: Config) -> dict[str, Any]:
    return {"attention.sliding_window": config["sliding_window"],
            "expert_feed_forward_length": config["intermediate_size"]}


def gpt_oss_tensors(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    for name, tensor in tensors.items():
        stem, suffix = (name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight")
        if name.endswith("sinks"): yield f"{name}.weight", tensor
        elif ".experts." not in name: yield name, tensor
        else:
            turned = tensor if suffix == "bias" else tensor.swapaxes(1, 2)
            if stem.endswith("down_proj"): yield f"{stem}.{suffix}", turned
            else:
                for first, part in enumerate(("gate", "up")):
                    yield f"{stem.replace('gate_up', part)}.{suffix}", turned[:, first::2]


def phi3(config: Config) -> dict[str, Any]:
    rope, heads = config["rope_parameters"], config["num_attention_heads"]
    original = config["original_max_position_embeddings"]
    made = {"rope.dimension_count":
            int(rope.get("partial_rotary_factor", 1.0) * config["hidden_size"]) // heads,
            "rope.scaling.original_context_length": original,
            "attention.sliding_window": config["sliding_window"] or 0}
    if "long_factor" in rope:
        scale = config["max_position_embeddings"] / original
        made["rope.scaling.attn_factor"] = \
            math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return made


def phi3_tensors(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    yield from tensors.items()
    for kind in ("long", "short"):
        if factors := config["rope_parameters"].get(f"{kind}_factor"):
            yield f"rope_factors_{kind}.weight", np.array(factors, np.float32)


def deepseek2(config: Config) -> dict[str, Any]:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    made = {"attention.head_count_kv": 1, "vocab_size": config["vocab_size"],
            "leading_dense_block_count": config["first_k_dense_replace"],
            "attention.kv_lora_rank": rank, "attention.key_length": rank + rotated,
            "attention.value_length": rank,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
            "attention.value_length_mla": config["v_head_dim"], "rope.dimension_count": rotated,
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_scale": float(config["routed_scaling_factor"])}
    if config["q_lora_rank"]: made["attention.q_lora_rank"] = config["q_lora_rank"]
    if config["model_type"] == "deepseek_v3": made["expert_gating_func"] = 2
    if config.get("norm_topk_prob"): made["expert_weights_norm"] = True
    if every := config["rope_parameters"].get("mscale_all_dim"):
        made["rope.scaling.yarn_log_multiplier"] = 0.1 * every
    return made


def deepseek2_tensors(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    nope = config["qk_nope_head_dim"]
    for name, tensor in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            yield name.replace("correction_bias", "correction.bias"), tensor
            continue
        heads = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[1])
        yield name.replace("kv_b_proj", "k_b_proj"), heads[:, :nope].swapaxes(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), heads[:, nope:]


def olmo2(config: Config) -> dict[str, Any]:
    if not config.get("sliding_window"): return {}
    return {"attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": [kind == SLIDING for kind in config["layer_types"]]}


def llama_like(config: Config) -> dict[str, Any]:
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {"vocab_size": config["vocab_size"], "rope.dimension_count": dim}


def granite(config: Config) -> dict[str, Any]:
    return {**llama_like(config), "attention.scale": config["attention_multiplier"],
            "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"], "logit_scale": config["logits_scaling"]}


def llama4(config: Config) -> dict[str, Any]:
    return {**llama_like(config), "feed_forward_length": config["intermediate_size_mlp"],
            "expert_feed_forward_length": config["intermediate_size"],
            "interleave_moe_layer_step": config["interleave_moe_layer_step"]}


def bands(config: Config) -> Iterator[tuple[str, np.ndarray]]:
    """What Llama 3's kind of rope divides frequencies by."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") != "llama3": return
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    low, high, original = (rope[key] for key in ("low_freq_factor", "high_freq_factor",
                                                 "original_max_position_embeddings"))
    smooth = np.clip((original / waves - low) / (high - low), 0, 1)
    yield "rope_freqs.weight", (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def llama4_tensors(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    yield from bands(config)
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(tensor.swapaxes(1, 2), 2, axis=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
        elif name.endswith("experts.down_proj"): yield f"{name}.weight", tensor.swapaxes(1, 2)
        else: yield name, tensor


@dataclass(frozen=True)
class Converter:
    arch: gguf.MODEL_ARCH
    metadata: Callable[[Config], dict[str, Any]]
    tensors: Callable[[Config, Tensors], Iterator[tuple[str, np.ndarray]]] = same


CONVERTERS = {
    "Gemma2ForCausalLM": Converter(gguf.MODEL_ARCH.GEMMA2, gemma2, raised),
    "Gemma3ForCausalLM": Converter(gguf.MODEL_ARCH.GEMMA3, gemma3, raised),
    "GptOssForCausalLM": Converter(gguf.MODEL_ARCH.GPT_OSS, gpt_oss, gpt_oss_tensors),
    "Phi3ForCausalLM": Converter(gguf.MODEL_ARCH.PHI3, phi3, phi3_tensors),
    "DeepseekV2ForCausalLM": Converter(gguf.MODEL_ARCH.DEEPSEEK2, deepseek2, deepseek2_tensors),
    "DeepseekV3ForCausalLM": Converter(gguf.MODEL_ARCH.DEEPSEEK2, deepseek2, deepseek2_tensors),
    "Olmo2ForCausalLM": Converter(gguf.MODEL_ARCH.OLMO2, olmo2),
    "Olmo3ForCausalLM": Converter(gguf.MODEL_ARCH.OLMO2, olmo2),
    "SmolLM3ForCausalLM": Converter(gguf.MODEL_ARCH.SMOLLM3, llama_like, neighbours),
    "GraniteForCausalLM": Converter(gguf.MODEL_ARCH.GRANITE, granite, neighbours),
    "Llama4ForCausalLM": Converter(gguf.MODEL_ARCH.LLAMA4, llama4, llama4_tensors)}


def converted(config: Config, tensors: Tensors) -> tuple[str, dict[str, Any], Tensors]:
    """The name of the architecture, metadata, and tensors."""
    converter = CONVERTERS[config["architectures"][0]]
    names = gguf.get_tensor_name_map(converter.arch, config["num_hidden_layers"])
    made: Tensors = {}
    for name, tensor in _stacked(dict(converter.tensors(config, tensors))).items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        made[name if name.startswith("rope_") else str(found)] = tensor
    return gguf.MODEL_ARCH_NAMES[converter.arch], {**common(config), **converter.metadata(config)}, made


def _stacked(tensors: Tensors) -> Tensors:
    """The matrices of a layer's experts as one tensor."""
    made: Tensors = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        if (found := EXPERT.fullmatch(name)) is None: made[name] = tensor
        else: experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = tensor
    return made | {name: np.stack([some[i] for i in sorted(some)]) for name, some in experts.items()}
