"""config.json of a Hugging Face directory, or a GGUF file's metadata, checked, as one frozen `ModelConfig`.

Protocol: `read_config(directory)` reads the file; everything the network needs is a field here, resolved
(defaults of the architecture filled in, both spellings of rope parameters and dtype accepted). Fields that
are not implemented raise an error by name: a silently ignored field is a silently wrong model.
"""
from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinygrad_nv.errors import ModelError
from tinygrad_nv.quant.gguf.split import open_gguf
from tinygrad_nv.quant.readers.reader import require_known

from . import gguf
from .rope import ROPE_TYPES, RopeConfig

DTYPES = ("float32", "float16", "bfloat16")
LAYER_TYPES = ("full_attention", "sliding_attention", "attention")  # the last: full attention in older files
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh",
               "gelu_pytorch_tanh": "gelu_tanh"}

# What transformers' own config classes fill in when config.json leaves a key out.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"head_dim": 128, "qk_norm": True, "num_key_value_heads": 32, "sliding_window": 4096},
    "GemmaForCausalLM": {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
                         "norm_offset": 1.0, "num_key_value_heads": 16},
}
# Fields that change what is computed: some in related families, per_layer_config (as is_causal: false, see
# `parse_config`) in these, too.
UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "num_experts",
               "num_local_experts", "attention_multiplier", "logits_scaling", "residual_multiplier",
               "embedding_multiplier", "use_bidirectional_attention", "per_layer_config")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the LLaMA family.

    Sizes: `D` = `head_dim`, `H` = `num_heads`, `H_kv` = `num_kv_heads`. `windows[i]` is the sliding window
    of layer i in tokens, None for full attention. `norm_offset` is added to RMSNorm weights (1 for Gemma).
    `output_bias` is the bias of the attention's output projection, `quantization` the quantization_config.
    """
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope: RopeConfig
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    activation: str = "silu"
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    embedding_scale: float = 1.0
    windows: tuple[int | None, ...] = ()
    dtype: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * q + 2 * kv + 3 * self.intermediate_size + 2)
        layer += (q + 2 * kv) * self.qkv_bias + self.hidden_size * self.output_bias
        layer += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        layer += 2 * self.head_dim * self.qk_norm
        return self.num_layers * layer + self.hidden_size * (self.vocab_size * (2 - self.tied) + 1)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`. Raises `ModelError` with the file and the position of an error."""
    try: data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}", "a readable UTF-8 text file",
                         "check its permissions, or download the file again") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}", "a JSON object",
                         "download the file again") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds a {type(data).__name__}", "a JSON object", "download the file again")
    return data


def read_config(directory: Path) -> ModelConfig:
    """The configuration of the model in `directory`. Raises `ModelError` naming what is missing or not
    supported."""
    if not os.path.exists(directory):  # unlike Path.exists, False for a name too long for the system
        raise ModelError(f"no such directory: {directory}",
                         "a Hugging Face model directory (config.json, weights), or a GGUF file",
                         "check the path; models are not downloaded")
    if (file := gguf.find(directory)) is not None:
        return parse_config(gguf.config_of(open_gguf(file)), str(file))
    _require_no_adapter(directory)
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(f"{directory} has no config.json", "a Hugging Face model directory",
                         "point MODEL at the folder that holds config.json")
    data, theirs = read_json(path), directory / "hf_quant_config.json"
    # ModelOpt's first versions say in a file of its own how weights are quantised
    if not data.get("quantization_config") and theirs.is_file():
        data["quantization_config"] = {"quant_method": "modelopt", **read_json(theirs)}
    return parse_config(data, str(path))


def _require_no_adapter(directory: Path) -> None:
    """Refuses an adapter, also one beside the weights of its model: transformers would apply it."""
    path = directory / "adapter_config.json"
    if not path.is_file(): return
    adapter = read_json(path)
    kind, base = str(adapter.get("peft_type", "LoRA"))[:40], str(adapter.get("base_model_name_or_path"))[:200]
    if kind == "LORA": kind = "LoRA"
    raise ModelError(f"{directory} is an adapter ({kind}) of the model {base}, and adapters are not read yet",
                     "a Hugging Face model directory, without adapter_config.json",
                     "merge it into its model with PEFT's merge_and_unload, save the result with "
                     "save_pretrained, and name that directory")


def parse_config(data: Mapping[str, Any], name: str = "config.json") -> ModelConfig:
    """`read_config` for an object already read; `name` is used in messages."""
    architecture = _architecture(data, name)
    raw = {**ARCHITECTURES[architecture], **data}
    found = [key for key in UNSUPPORTED if raw.get(key)] + ["is_causal"] * (not raw.get("is_causal", True))
    if found:
        raise ModelError(f"{name}: {found[0]} is {raw[found[0]]!r}, which is not implemented",
                         "a model without it", "use a model of a supported family as it was published")
    hidden, heads = _positive(raw, "hidden_size", name), _positive(raw, "num_attention_heads", name)
    if raw.get("head_dim") is None and hidden % heads:
        raise ModelError(f"{name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}",
                         "a multiple, or an explicit head_dim")
    head_dim = _positive(raw, "head_dim", name) if raw.get("head_dim") is not None else hidden // heads
    kv_heads = heads
    if raw.get("num_key_value_heads") is not None: kv_heads = _positive(raw, "num_key_value_heads", name)
    if heads % kv_heads:
        raise ModelError(f"{name}: num_attention_heads {heads} is not a multiple of "
                         f"num_key_value_heads {kv_heads}",
                         "each key/value head shared by the same number of query heads")
    layers = _positive(raw, "num_hidden_layers", name)
    positions = _positive(raw, "max_position_embeddings", name)
    own, attention_bias = ARCHITECTURES[architecture], bool(raw.get("attention_bias", False))
    # Qwen2 has biases on q, k and v, and Mistral none, whatever config.json says
    bias = architecture == "Qwen2ForCausalLM" or (attention_bias and architecture != "MistralForCausalLM")
    return ModelConfig(
        architecture=architecture, vocab_size=_positive(raw, "vocab_size", name), hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size", name), num_layers=layers, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, max_positions=positions,
        rope=_rope(raw, head_dim, positions, name),
        norm_eps=_number({"rms_norm_eps": 1e-6, **raw}, "rms_norm_eps", name),
        norm_offset=own.get("norm_offset", 0.0), activation=_activation(raw, architecture, name),
        tied=bool(raw.get("tie_word_embeddings", False)), qkv_bias=bias,
        output_bias=bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(architecture == "LlamaForCausalLM" and raw.get("mlp_bias", False)),
        qk_norm=own.get("qk_norm", False),
        embedding_scale=hidden ** 0.5 if architecture == "GemmaForCausalLM" else 1.0,
        windows=_windows(raw, architecture, layers, name), dtype=_dtype(raw, name), eos_token_ids=token_ids(
            raw.get("eos_token_id"), f"{name}: eos_token_id"), quantization=_quantization(raw, name))


def _quantization(raw: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """What a checkpoint says of its quantised weights."""
    # llmcompressor's first files have another name for it
    if not (given := raw.get("quantization_config") or raw.get("compression_config")): return None
    if not isinstance(given, dict):
        raise ModelError(f"{name}: quantization_config is {given!r}", "an object with a quant_method",
                         "correct the file, or download it again")
    require_known(given, name)
    return given


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """An id, a list of ids or null, as a tuple."""
    values = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
        raise ModelError(f"{name} is {value!r}", "a token id, a list of them, or null", "correct the file")
    return values


def _architecture(data: Mapping[str, Any], name: str) -> str:
    have = ", ".join(ARCHITECTURES)
    listed = data.get("architectures")
    if not isinstance(listed, list) or not listed:
        raise ModelError(f"{name} names no architectures", f"a list with one of: {have}",
                         "use a causal language model saved by transformers")
    if (known := next((a for a in listed if isinstance(a, str) and a in ARCHITECTURES), None)) is None:
        raise ModelError(f"{name}: architecture {', '.join(map(str, listed))} is not supported",
                         f"one of: {have}",
                         "convert the model to one of these, or add it (see CONTRIBUTING.md)")
    return known


def _positive(raw: Mapping[str, Any], key: str, name: str) -> int:
    if not isinstance(value := raw.get(key), int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{name}: {key} is {value!r}", "a positive integer",
                         "correct the file, or download it again")
    return value


def _number(raw: Mapping[str, Any], key: str, name: str, least: float = 0.0) -> float:
    value = raw.get(key)
    # the comparison refuses NaN, infinity, and integers that no float holds
    if (not isinstance(value, int | float) or isinstance(value, bool)
        or not least < value <= sys.float_info.max):
        raise ModelError(f"{name}: {key} is {value!r}", f"a number > {least:g}",
                         "correct the file, or download it again")
    return float(value)


def _rope(raw: Mapping[str, Any], head_dim: int, positions: int, name: str) -> RopeConfig:
    # transformers 5 writes rope_parameters (theta inside); before that rope_theta and rope_scaling stood
    # apart. Where a file has both, transformers reads rope_scaling.
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ModelError(f"{name}: rope parameters are {given!r}",
                         "an object of numbers, the same for all layers")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ModelError(f"{name}: rope type {kind!r} is not supported", f"one of: {', '.join(ROPE_TYPES)}")
    if head_dim % 2: raise ModelError(f"{name}: head_dim is {head_dim}", "an even number: rope rotates pairs")
    both = {"rope_theta": 10000.0, **raw, **given}
    _require_whole_heads(both, kind, name)
    names = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
             "mscale", "mscale_all_dim")
    numbers = {key: _number(given, key, name, -1.0 if key.startswith("mscale") else 0.0)
               for key in names if given.get(key) is not None}
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
              "yarn": ("factor",), "dynamic": ("factor",)}.get(kind, ())
    if missing := [key for key in needed if key not in numbers]:
        raise ModelError(f"{name}: rope type {kind} lacks {', '.join(missing)}", f"{', '.join(needed)}")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise ModelError(f"{name}: low_freq_factor {numbers['low_freq_factor']:g} is not below "
                         f"high_freq_factor {numbers['high_freq_factor']:g}",
                         "a smaller and a larger number of rotations")
    # at 1 every frequency is 1, and YaRN divides by its logarithm
    theta = _number(both, "rope_theta", name, 1.0)
    original = "original_max_position_embeddings"
    # beside the rope parameters it precedes the one among them, as in transformers
    for section in (given, raw):
        if section.get(original) is not None: positions = _positive(section, original, name)
    return RopeConfig(kind=kind, theta=theta, dim=head_dim, original_positions=positions,
                      truncate=bool(given.get("truncate", True)), factors=_factors(given, head_dim, name),
                      **numbers)


def _factors(given: Mapping[str, Any], head_dim: int, name: str) -> tuple[float, ...]:
    """Of rope type factors, one for each pair of dimensions."""
    if given.get("rope_type") != "factors": return ()
    factors = given.get("factors")
    if not isinstance(factors, list) or len(factors) != head_dim // 2:
        count = len(factors) if isinstance(factors, list) else 0
        raise ModelError(f"{name}: rope type factors has {count} factors",
                         f"{head_dim // 2}, one for each pair of dimensions of a head")
    return tuple(_number({"rope factor": each}, "rope factor", name) for each in factors)


def _require_whole_heads(both: Mapping[str, Any], kind: str, name: str) -> None:
    """Refuses a partial_rotary_factor that transformers cannot run: these families rotate whole heads, and
    ignore the field unless a scaled kind of rope reads it."""
    factor = both.get("partial_rotary_factor")
    if kind == "default" or factor is None: return
    if _number(both, "partial_rotary_factor", name) != 1.0:
        raise ModelError(f"{name}: partial_rotary_factor is {factor!r} with rope type {kind}",
                         "1: these families rotate whole heads", "remove the field, or correct it")


def _activation(raw: Mapping[str, Any], architecture: str, name: str) -> str:
    act = raw.get("hidden_act", "silu")
    # Gemma's published configs say "gelu" and mean the tanh approximation, as in transformers since 4.38
    if architecture == "GemmaForCausalLM" and act == "gelu": act = "gelu_pytorch_tanh"
    if not isinstance(act, str) or act not in ACTIVATIONS:
        raise ModelError(f"{name}: hidden_act {act!r} is not supported", f"one of: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[act]


def _windows(raw: Mapping[str, Any], architecture: str, layers: int, name: str) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if window is not None: window = _positive(raw, "sliding_window", name)
    if architecture == "MistralForCausalLM": return (window,) * layers
    if architecture not in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"): return (None,) * layers
    if not raw.get("use_sliding_window"): window = None
    if (types := raw.get("layer_types")) is None:
        first = raw.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool):
            raise ModelError(f"{name}: max_window_layers is {first!r}", "a number of layers")
        return tuple(window if i >= first else None for i in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise ModelError(f"{name}: layer_types is {types!r}", f"a list of {layers}, one entry for each layer")
    if unknown := [kind for kind in types if kind not in LAYER_TYPES]:
        raise ModelError(f"{name}: layer type {unknown[0]!r} is not supported",
                         "full_attention or sliding_attention")
    if window is None and "sliding_attention" in types:
        raise ModelError(f"{name}: layer_types has sliding_attention, but no sliding_window is in use",
                         "use_sliding_window: true and a sliding_window, or full_attention in every layer",
                         "correct the file, or download it again")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _dtype(raw: Mapping[str, Any], name: str) -> str | None:
    if not (given := raw.get("dtype") or raw.get("torch_dtype")): return None
    dtype = str(given).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"{name}: dtype {dtype!r} is not supported", f"one of: {', '.join(DTYPES)}")
    return dtype
