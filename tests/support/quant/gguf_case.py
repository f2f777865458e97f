"""GGUF files of Hugging Face models, written as llama.cpp's converter writes them: its names and keys, rows
of queries and keys of LLaMA in its order, norms of Gemma plus one."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from tests.support.quant.gguf_families import CONVERTERS, bands, converted

KINDS = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2",
         "Qwen3ForCausalLM": "qwen3", "GemmaForCausalLM": "gemma", "MixtralForCausalLM": "llama",
         "Qwen2MoeForCausalLM": "qwen2moe", "Qwen3MoeForCausalLM": "qwen3moe", "OlmoeForCausalLM": "olmoe"}
LAYERS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q",
          "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "q_norm": "attn_q_norm",
          "k_norm": "attn_k_norm", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
          "gate": "ffn_gate_inp", "shared_expert_gate": "ffn_gate_inp_shexp", "w1": "ffn_gate",
          "w3": "ffn_up", "w2": "ffn_down"}
TOPS = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """Of a tensor."""
    *above, stem, suffix = name.split(".")
    if "experts" in above: return f"blk.{above[2]}.{LAYERS[stem]}_exps.{suffix}"
    if "shared_expert" in above: return f"blk.{above[2]}.{LAYERS[stem]}_shexp.{suffix}"
    return f"blk.{above[2]}.{LAYERS[stem]}.{suffix}" if "layers" in above else f"{TOPS[stem]}.{suffix}"


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By GGUF names, the matrices of a layer's experts as one tensor."""
    made: dict[str, list[np.ndarray]] = {}

    def place(name: str) -> tuple[str, int]:
        _, there, rest = name.partition(".experts.")
        return gguf_name(name), int(rest.split(".")[0]) if there else 0
    for name in sorted(tensors, key=place): made.setdefault(gguf_name(name), []).append(tensors[name])
    return {name: np.stack(some) if "_exps" in name else some[0] for name, some in made.items()}


def in_llama_cpp_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys: rope's pairs as neighbours."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def random_blocks(shape: tuple[int, ...], kind: Kind, seed: int = 0) -> np.ndarray:
    """Of a type that gguf cannot quantise to: any codes and scales of small integers, outer scales that give
    weights of about 0.05."""
    columns, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // columns, nbytes), dtype=np.uint8)
    sizes = {Kind.Q4_K: (.0002, 0, .0002, 2), Kind.Q5_K: (.0001, 0, .0001, 2), Kind.Q6_K: (.00004, 208),
             Kind.Q3_K: (.0008, 108), Kind.Q2_K: (.004, 80, .002, 82), Kind.IQ4_XS: (.00004, 0)}[kind]
    for size, at in zip(sizes[::2], sizes[1::2], strict=True):
        scales = size * rng.uniform(.5, 1, (*raw.shape[:-1], 1))
        raw[..., int(at):int(at) + 2] = scales.astype("<f2").view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def q4_k(weight: np.ndarray) -> np.ndarray:
    """Rounded to scales and minima of 32."""
    parts = weight.reshape(-1, 8, 32)
    low = np.minimum(parts.min(-1), 0)
    outer = [each.max(-1, keepdims=True) / 63 for each in ((parts.max(-1) - low) / 15, -low)]
    d, dmin = (each.astype("<f2") for each in outer)
    scales = np.round((parts.max(-1) - low) / 15 / outer[0]).astype(np.uint8)
    mins = np.round(-low / outer[1]).astype(np.uint8)
    steps = np.maximum(d.astype(np.float32) * scales, 1e-9)[..., None]
    codes = np.round((parts + (dmin.astype(np.float32) * mins)[..., None]) / steps).clip(0, 15)
    codes = codes.astype(np.uint8).reshape(-1, 4, 2, 32)
    upper = [scales[:, 4:] >> 4 << 6 | scales[:, :4], mins[:, 4:] >> 4 << 6 | mins[:, :4]]
    packed = [d.view(np.uint8), dmin.view(np.uint8), *upper, scales[:, 4:] & 15 | mins[:, 4:] << 4,
              (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(-1, 128)]
    return np.hstack(packed).reshape(*weight.shape[:-1], -1)


def q6_k(weight: np.ndarray) -> np.ndarray:
    """Rounded to scales of 16."""
    parts = weight.reshape(-1, 16, 16)
    most = np.abs(parts).max(-1)
    d = (most.max(-1, keepdims=True) / 31 / 127).astype("<f2")
    scales = np.round(most / 31 / d.astype(np.float32)).clip(1, 127).astype(np.int8)
    codes = np.round(parts / (d.astype(np.float32) * scales)[..., None]).clip(-32, 31) + 32
    codes = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = codes & 15
    nibbles = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=-1)
    upper = codes >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]
    packed = [nibbles.reshape(-1, 128), np.bitwise_or.reduce(upper, axis=2).reshape(-1, 64),
              scales.view(np.uint8), d.view(np.uint8)]
    return np.hstack(packed).reshape(*weight.shape[:-1], -1)


def quantised(weight: np.ndarray, kind: Kind, seed: int) -> np.ndarray:
    """Of the weight where there is a quantiser, else random."""
    own = {Kind.Q4_K: q4_k, Kind.Q6_K: q6_k}
    if kind in own: return own[kind](weight)
    try: return gguf.quantize(weight, kind)
    except NotImplementedError: return random_blocks(weight.shape, kind, seed)


def write_model(path: Path, directory: Path, kinds: dict[str, Kind] | Kind = Kind.F32,
                metadata: dict[str, Any] | None = None, split: int = 0, apart: bool = False,
                plain: bool = False) -> None:
    """The model of a directory, its matrices as `kinds`, by parts of GGUF names ("" for all). `metadata`
    replaces or, with None, leaves out. `split`: into files of so many tensors. `apart`: each expert has
    tensors of its own. `plain`: instead of blocks the numbers that they stand for."""
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    kinds = kinds if isinstance(kinds, dict) else {"": kinds}
    if config["architectures"][0] in CONVERTERS: arch, given, whole = converted(config, tensors)
    else: arch, given, whole = _of_llama(config, tensors, apart)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    given = {f"{arch}.{key}": value for key, value in given.items()}
    for key, value in (given | (metadata or {})).items(): add(writer, key, value)
    for seed, (name, weight) in enumerate(whole.items()):
        if name == "output.weight" and config["tie_word_embeddings"]: continue
        weight = np.ascontiguousarray(weight, np.float32)
        kind = next((kind for part, kind in kinds.items() if part in name), Kind.F32)
        vector = weight.ndim == 1 or name.endswith(".bias")
        if vector or kind == Kind.F32: writer.add_tensor(name, weight)
        elif kind == Kind.F16: writer.add_tensor(name, weight.astype(np.float16))
        elif plain: writer.add_tensor(name, gguf.dequantize(quantised(weight, kind, seed), kind))
        else: writer.add_tensor(name, quantised(weight, kind, seed), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _of_llama(config: dict[str, Any], tensors: dict[str, np.ndarray],
              apart: bool) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
    """Architecture, metadata and tensors of a model like LLaMA."""
    arch = KINDS[config["architectures"][0]]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    whole = stacked(tensors)
    if apart:
        whole = {name.replace("_exps", f".{i}" * (weight is not one)): one for name, weight in whole.items()
                 for i, one in enumerate(weight if "_exps" in name else [weight])}
    for name, weight in whole.items():
        part = name.split(".")[-2]
        if arch == "llama" and part in heads: whole[name] = in_llama_cpp_order(weight, heads[part])
        if arch == "gemma" and name.endswith("norm.weight"): whole[name] = weight.astype(np.float32) + 1
    return arch, _metadata(config, tensors), whole | dict(bands(config))


def _metadata(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    made = {"context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
            "block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"],
            "attention.head_count": heads, "attention.head_count_kv": config["num_key_value_heads"],
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "attention.key_length": dim,
            "attention.value_length": dim, "rope.dimension_count": dim,
            "rope.freq_base": rope.get("rope_theta", 10000.0), "vocab_size": config["vocab_size"]}
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts: made |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
    for key, there in (("moe_intermediate_size", "expert_feed_forward_length"),
                       ("shared_expert_intermediate_size", "expert_shared_feed_forward_length")):
        if config.get(key): made[there] = config[key]
    if rope.get("rope_type") in ("linear", "yarn"):
        made |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        if original := rope.get("original_max_position_embeddings"):
            made["rope.scaling.original_context_length"] = original
    return made


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """An entry; None is left out."""
    if value is None: return
    if isinstance(value, bool): writer.add_bool(key, value)
    elif isinstance(value, int): writer.add_uint32(key, value)
    elif isinstance(value, float): writer.add_float32(key, value)
    elif isinstance(value, str): writer.add_string(key, value)
    else: writer.add_array(key, value)


def tokenizer_metadata(tokenizer: Tokenizer, pre: str | None, template: str | None = None, bos: str = "",
                       eos: str = "", unknown: str = "") -> dict[str, Any]:
    """What the converter writes of a tokenizer: byte-level with `pre`, else of SentencePiece."""
    model, vocabulary = json.loads(tokenizer.to_str())["model"], tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    ranks = {merge.replace(" ", ""): i for i, merge in reversed(list(enumerate(merges)))}
    types = [(3 if added[i].special else 4) if i in added else 6 if pre is None and token.startswith("<0x")
             else 1 for i, token in enumerate(tokens)]
    made: dict[str, Any] = {"model": "gpt2" if pre else "llama", "pre": pre or "default", "tokens": tokens}
    if pre: made["merges"] = merges
    else:
        made["scores"] = [float(-ranks.get(token, -1e6 if i in added else 1e6 + i))
                          for i, token in enumerate(tokens)]
        if unknown: types[vocabulary[unknown]] = 2
    made["token_type"] = types
    for name, text in (("bos_token_id", bos), ("eos_token_id", eos), ("unknown_token_id", unknown)):
        if text: made[name] = vocabulary[text]
    if bos: made["add_bos_token"] = True
    found = {f"tokenizer.ggml.{key}": value for key, value in made.items()}
    return found | ({} if template is None else {"tokenizer.chat_template": template})
