"""GGUF files as models: what their metadata mean in terms of config.json, and their tensors under Hugging
Face's names.

Protocol: `find(path)` is the file that a model's path means. `config_of(file)` is what config.json would be,
for `config.parse_config`; its quantization_config has the types of blocks (quant/readers/gguf.py).
`stored(file)` are the tensors as a checkpoint lists them.

A tensor of the matrices of all experts is listed as one for each, as Hugging Face has them. Whether weights
of a token's experts are renormalised is no metadata: llama.cpp knows it of an architecture, as `FIXED` says.

What llama.cpp's converter changes is undone: it orders the rows of queries and keys of LLaMA so that rope
rotates neighbours, and it adds 1 to Gemma's norms. Rope frequencies of Llama 3 are a tensor of factors.

Source: docs/gguf.md of https://github.com/ggml-org/ggml, convert_hf_to_gguf.py of llama.cpp
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_nv.errors import ModelError
from tinygrad_nv.quant.gguf import blocks
from tinygrad_nv.quant.gguf.file import GGUFFile, GGUFTensor
from tinygrad_nv.quant.gguf.split import parts_of
from tinygrad_nv.quant.readers.gguf import row_order

from .families import mixtral
from .names import LLAMA_NAMES, Names

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
                 "gemma": "GemmaForCausalLM", "qwen2moe": "Qwen2MoeForCausalLM",
                 "qwen3moe": "Qwen3MoeForCausalLM", "olmoe": "OlmoeForCausalLM"}
MIXTRAL = "MixtralForCausalLM"      # what a llama with experts is
FIXED = {"qwen2moe": {"norm_topk_prob": False}, "qwen3moe": {"norm_topk_prob": True},
         "olmoe": {"norm_topk_prob": False}}
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
EMBEDDING, HEAD, FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"

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
            "embedding_scale": "embedding_multiplier"}
SCALING = {"factor": "factor", "original_context_length": "original_max_position_embeddings",
           "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
               "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
               "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
               "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
               "ffn_down": "mlp.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
               "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
               "ffn_down_shexp": "mlp.shared_expert.down_proj"}
ROUTER = "ffn_gate_inp"
EXPERTS = {"ffn_gate_exps": 0, "ffn_up_exps": 1, "ffn_down_exps": 2}    # places in Names.expert_matrices
# settings of experts that no supported architecture has, with the values that change nothing
NEUTRAL = {"expert_weights_scale": (0.0, 1.0), "expert_gating_func": (1,), "expert_group_count": (0, 1)}


def find(path: Path) -> Path | None:
    """The GGUF file that `path` is, or the only one in a directory without config.json; of a model in several
    files one of them. Raises `ModelError` for several models."""
    if path.is_file():
        try:
            with path.open("rb") as file: start = file.read(4)
        except OSError: start = b""
        return path if start == b"GGUF" or path.suffix.lower() == ".gguf" else None
    if not path.is_dir() or (path / "config.json").is_file(): return None
    found = sorted(each for each in path.glob("*") if each.suffix.lower() == ".gguf")
    if len({parts_of(each)[0] for each in found}) > 1:
        raise ModelError(f"{path} holds {len(found)} GGUF files ({found[0].name}, {found[1].name}, …)",
                         "one, or the name of one", f"name the file: {found[0]}")
    return found[0] if found else None


def hugging_face_name(name: str, names: Names = LLAMA_NAMES) -> str:
    """blk.0.attn_q.weight → model.layers.0.self_attn.q_proj.weight; unknown names as they are. Of the
    matrices of experts {} stands for an expert's number."""
    stem, dot, suffix = name.rpartition(".")
    if stem in NAMES: return f"{NAMES[stem]}{dot}{suffix}"
    block, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    found = LAYER_NAMES.get(part, names.router if part == ROUTER else "")
    stem, _, expert = part.partition(".")
    if part in EXPERTS: stem, expert = part.removesuffix("_exps"), "{}"
    # older files have a tensor for each expert
    if f"{stem}_exps" in EXPERTS and expert:
        found = f"{names.expert.format(expert)}.{names.expert_matrices[EXPERTS[f'{stem}_exps']]}"
    return f"model.layers.{number}.{found}{dot}{suffix}" if block == "blk" and found else name


# **** metadata ****

def config_of(file: GGUFFile) -> dict[str, Any]:
    """What config.json would be. Raises `ModelError` for an architecture that is not implemented, or for
    metadata that are missing."""
    kind = file.metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ModelError(f"{file.path}: general.architecture is {kind!r}",
                         f"one of {', '.join(ARCHITECTURES)}", "use a model of a supported family")
    own = {key.removeprefix(f"{kind}."): value for key, value in file.metadata.items()
           if key.startswith(f"{kind}.")}
    if missing := [key for key in REQUIRED if key not in own]:
        raise ModelError(f"{file.path} has no {kind}.{missing[0]}", "the metadata that llama.cpp writes",
                         "convert the model again with llama.cpp")
    made = {name: _single(file, key, own[key]) for key, name in (REQUIRED | OPTIONAL).items()
            if key in own and not (key.endswith("_scale") and own[key] == 1.0)}
    made.setdefault("num_key_value_heads", made["num_attention_heads"])
    for key, same in NEUTRAL.items():
        if own.get(key, same[0]) not in same:
            raise ModelError(f"{file.path}: {kind}.{key} is {own[key]!r}, which is not implemented",
                             f"{' or '.join(map(str, same))}", "use a model of a supported family")
    made |= FIXED.get(kind, {})
    made |= {"architectures": [_mixture(file) or ARCHITECTURES[kind]],
             "tie_word_embeddings": HEAD not in file.tensors,
             "vocab_size": _vocabulary(file, own), "eos_token_id": _end_tokens(file),
             "attention_bias": "blk.0.attn_q.bias" in file.tensors,
             "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
             "head_dim": _head_dim(file, own, made), "rope_scaling": _rope_scaling(file, own)}
    if own.get("attention.sliding_window"): made |= _windows(kind, own["attention.sliding_window"]) \
        | ({"architectures": [MIXTRAL]} if _mixture(file) else {})
    if types := _types(file): made["quantization_config"] = {"quant_method": "gguf", "types": types,
                                                             "heads": _reordered(file)}
    return made


def _mixture(file: GGUFFile) -> str:
    """Mixtral's architecture, where a llama has experts; else ""."""
    experts = file.metadata.get("llama.expert_count")
    return MIXTRAL if file.metadata.get("general.architecture") == "llama" and experts else ""


def _single(file: GGUFFile, key: str, value: Any) -> Any:
    """A value for all layers, of one for each."""
    if not isinstance(value, list) or not value: return value
    if any(each != value[0] for each in value):
        raise ModelError(f"{file.path}: {key} is {str(value)[:60]}", "the same for all layers",
                         "use a model of a supported family")
    return value[0]


def _vocabulary(file: GGUFFile, own: Mapping[str, Any]) -> Any:
    embedding = file.tensors.get(EMBEDDING)
    return own.get("vocab_size") if embedding is None else embedding.shape[0]


def _end_tokens(file: GGUFFile) -> list[Any]:
    found = [file.metadata.get(f"tokenizer.ggml.{key}") for key in END_TOKENS]
    return list(dict.fromkeys(token for token in found if token is not None))


def _head_dim(file: GGUFFile, own: Mapping[str, Any], made: Mapping[str, Any]) -> Any:
    hidden, heads = made["hidden_size"], made["num_attention_heads"]
    whole = isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads == 0
    usual = hidden // heads if whole else None
    rotated = own.get("rope.dimension_count")
    dim = own.get("attention.key_length", rotated or usual)
    for key, value in (("attention.value_length", own.get("attention.value_length")),
                       ("rope.dimension_count", rotated)):
        if value not in (None, dim):
            raise ModelError(f"{file.path}: {key} is {value!r}, and heads have {dim!r} elements",
                             "values as long as keys, all of which are rotated",
                             "use a model of a supported family")
    return dim


def _windows(kind: str, window: Any) -> dict[str, Any]:
    if kind == "llama": return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}


def _rope_scaling(file: GGUFFile, own: Mapping[str, Any]) -> dict[str, Any] | None:
    """As rope_scaling of config.json. The factors of Llama 3 are a kind of rope of their own."""
    given = {key.removeprefix("rope.scaling."): value for key, value in own.items()
             if key.startswith("rope.scaling.") and not key.endswith(".finetuned")}
    kind = given.pop("type", "linear")
    if "rope.scale_linear" in own: given.setdefault("factor", own["rope.scale_linear"])   # of older files
    scaled = kind != "none" and (kind != "linear" or given.get("factor", 1.0) not in (0.0, 1.0))
    if FACTORS in file.tensors:
        if scaled:
            raise ModelError(f"{file.path} has {FACTORS} and rope scaling of type {kind!r}", "one of them",
                             "convert the model again with llama.cpp")
        factors = blocks.values(file.tensors[FACTORS].format, file.raw(FACTORS))
        return {"rope_type": "factors", "factors": factors.reshape(-1).tolist()}
    if not scaled: return None
    attention = given.pop("attn_factor", given.pop("yarn_attn_factor", 1.0))
    if unknown := [key for key in given if key not in SCALING]:
        raise ModelError(f"{file.path}: rope.scaling.{unknown[0]} is {given[unknown[0]]!r}",
                         f"a rope scaling of {', '.join(SCALING)}", "use a model of a supported family")
    made = {"rope_type": kind, **{SCALING[key]: value for key, value in given.items()}}
    factor = made.get("factor")
    if attention != 1.0 and isinstance(factor, float) and factor > 1:
        # llama.cpp multiplies YaRN's own factor
        made["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return made


# **** tensors ****

@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: its Hugging Face name; a dtype of plain floats, or U8 for rows of blocks that
    a reader takes; its `shape` in elements of that dtype."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    source: GGUFTensor


def stored(file: GGUFFile) -> list[StoredTensor]:
    """The tensors of a model. An embedding of blocks is listed for the head, too, if that is tied."""
    made, names = [], mixtral.NAMES if _mixture(file) else LLAMA_NAMES
    for whole in file.tensors.values():
        if whole.name == FACTORS: continue
        name = hugging_face_name(whole.name, names)
        for number, source in enumerate(_matrices(whole)):
            shape, dtype = source.shape, FLOATS.get(source.format.name, "U8")
            if _offset(file, source): dtype = "float32"
            blocked = (*shape[:-1], source.format.row_bytes(shape[-1]))
            made.append(StoredTensor(name.format(number) if "{}" in name else name, dtype,
                                     blocked if dtype == "U8" else shape, source))
        if source.name == EMBEDDING and source.format.type is not None and HEAD not in file.tensors:
            made.append(StoredTensor(hugging_face_name(HEAD), "U8", blocked, source))
    return made


def _matrices(source: GGUFTensor) -> list[GGUFTensor]:
    """Of a tensor of experts, the matrix of each; else the tensor itself."""
    part = source.name.split(".")[2] if source.name.startswith("blk.") else ""
    # llama.cpp drops an extent of 1
    if part == "ffn_gate_inp_shexp" and len(source.shape) == 1:
        return [replace(source, shape=(1, *source.shape))]
    if part not in EXPERTS or len(source.shape) != 3: return [source]
    step = source.nbytes // source.shape[0]
    return [replace(source, shape=source.shape[1:], offset=source.offset + i * step)
            for i in range(source.shape[0])]


def elements(file: GGUFFile, tensor: StoredTensor, begin: int, end: int) -> np.ndarray:
    """Elements [begin, end) of plain floats, in the order and with the offset that Hugging Face has."""
    source = tensor.source
    heads = _reordered(file).get(tensor.name.rpartition(".")[0].rpartition(".")[2])
    columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    first, last = begin // columns, -(-end // columns)
    raw = file.bytes_of(source)
    if len(tensor.shape) == 1: raw = raw.reshape(tensor.shape[0], -1)
    rows = raw[first:last] if heads is None else raw[row_order(len(raw), heads)[first:last]]
    numbers = (blocks.values if tensor.dtype == "float32" else blocks.floats)(source.format, rows)
    if _offset(file, source): numbers = numbers - np.float32(1)
    return numbers.reshape(-1)[begin - first * columns:end - first * columns]


def _types(file: GGUFFile) -> dict[str, int]:
    """ggml's number of the type of each matrix of blocks."""
    numbers = {format.name: number for number, format in blocks.FORMATS.items()}
    return {each.name: numbers[each.source.format.name] for each in stored(file) if each.dtype == "U8"}


def _reordered(file: GGUFFile) -> dict[str, int]:
    """Heads of the projections whose rows llama.cpp ordered."""
    if file.metadata["general.architecture"] != "llama": return {}
    heads = file.metadata["llama.attention.head_count"]
    shared = file.metadata.get("llama.attention.head_count_kv", heads)
    both = [each[0] if isinstance(each, list) else each for each in (heads, shared)]
    return dict(zip(("q_proj", "k_proj"), both, strict=True))


def _offset(file: GGUFFile, source: GGUFTensor) -> bool:
    """Whether llama.cpp added 1."""
    return file.metadata["general.architecture"] == "gemma" and source.name.endswith("norm.weight")
