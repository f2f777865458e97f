"""config.json of a Hugging Face directory, or a GGUF file's metadata, checked, as one frozen
`ModelConfig`.

Protocol: `read_config(directory)` reads the file; everything the network needs is a field here, resolved
(defaults of the architecture filled in, both spellings of rope parameters and dtype accepted). What a
family does differently from LLaMA is in its file of families/. Fields that are not implemented raise an
error by name: a silently ignored field is a silently wrong model.
"""
from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tinygrad.dtype import DType

from tinygrad_nv import files
from tinygrad_nv.errors import ModelError, brief, shorten
from tinygrad_nv.files import MAX_JSON_BYTES
from tinygrad_nv.kvcache.shape import KVShape

from .families import FAMILIES
from .families.family import Family
from .fields import Fields, activation
from .layer_config import LLAMA_NAMES, LatentConfig, MoEConfig, Names, NormedSums, Temperature
from .mixers.config import BesideConfig, MixerConfig
from .model_types import architectures_of
from .multimodal import language_config
from .rope import RopeConfig, distinct, rope_config, rope_parameters

Half: TypeAlias = Literal["both", "mixer", "feed_forward"]
DTYPES = ("float32", "float16", "bfloat16")
# Fields that change what is computed, in some families: the others refuse them. per_layer_config does so in
# all.
REFUSED = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "num_experts",
           "num_local_experts", "n_routed_experts", "attention_multiplier", "logits_scaling",
           "residual_multiplier", "embedding_multiplier", "clip_qkv", "use_bidirectional_attention",
           "per_layer_config")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the LLaMA family.

    Sizes: `D` = `head_dim`, `H` = `num_heads`, `H_kv` = `num_kv_heads`. Of each layer `windows` has the
    sliding window in tokens, None for full attention, `ropes` the rotation, None for none. `norm_offset`
    is added to RMSNorm weights (1 for Gemma); with `norm_rounds_last` they multiply before the result is
    rounded. `qk_norm` normalises queries and keys, each "head" or "all" heads together; "unit" each head of
    layers with rope, without a weight. Scores are multiplied by `attention_scale` (1/√D) and become
    cap · tanh(s / cap) with `softcap`, logits with `logit_softcap`, after they were divided by
    `logit_divisor`. What a layer adds to its input is
    multiplied by `residual_scale`. With `chunked` a window is a chunk of keys, of which a token sees its own.
    `sinks` are a logit of each head beside those of keys. With `rope_interleaved` adjacent elements of a head
    are rotated together, in float32; layers without rope have the `temperature`. With `latent` keys and
    values are computed of latents, and `head_dim` is that of queries. A checkpoint's `draft_layers` after the
    others are not read. Layers with an entry in `mixers` have that in the place of attention
    (models/mixers/). `halves` says of each layer whether it has "both" halves, or attention or a "mixer"
    alone, or a "feed_forward" alone; () is both of all. With `float32_residuals` layers add up in float32,
    with `normed_sums` to the norm of what they are given.
    Unless `mlp_gated` a feed-forward is down(act(up(x))). Gates of a feed-forward are multiplied by the first
    of `mlp_scales` before the activation, what it makes by the second. With `gated_attention` queries come
    with a gate for each of their elements, or values are followed by a gate for each of the "heads". Unless
    `causal` tokens attend in both directions, and a window is as wide on either side (embedding models).
    Layers with a mixer have norms of `mixer_names`, if there are any. `output_bias` is the bias of the
    attention's output projection,
    `quantization` the quantization_config.
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
    ropes: tuple[RopeConfig | None, ...]
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    norm_rounds_last: bool = False
    activation: str = "silu"
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""
    attention_scale: float | None = None
    softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    logit_softcap: float | None = None
    windows: tuple[int | None, ...] = ()
    chunked: bool = False
    sinks: bool = False
    rope_interleaved: bool = False
    temperature: Temperature | None = None
    moe: MoEConfig | None = None
    latent: LatentConfig | None = None
    mixers: tuple[MixerConfig | None, ...] = ()
    halves: tuple[Half, ...] = ()
    float32_residuals: bool = False
    normed_sums: NormedSums | None = None
    gated_attention: bool | Literal["heads"] = False
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    mlp_gated: bool = True
    draft_layers: int = 0
    causal: bool = True
    names: Names = LLAMA_NAMES
    mixer_names: Names | None = None
    dtype: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def distinct_ropes(self) -> tuple[RopeConfig, ...]:
        """The ropes of all layers, each once."""
        return distinct(self.ropes)

    @property
    def rope_indices(self) -> tuple[int | None, ...]:
        """Index of each layer's rope among `distinct_ropes`."""
        return tuple(None if each is None else self.distinct_ropes.index(each) for each in self.ropes)

    def mixer(self, layer: int) -> MixerConfig | None:
        """The mixer that a layer has in the place of attention; None: attention."""
        return self.mixers[layer] if self.mixers else None

    def names_of(self, layer: int) -> Names:
        """The names of a layer's norms."""
        return self.names if self.mixer_names is None or self.mixer(layer) is None else self.mixer_names

    def has_mixer(self, layer: int) -> bool:
        """Whether a layer has attention, or a mixer in its place."""
        return not self.halves or self.halves[layer] != "feed_forward"

    def has_feed_forward(self, layer: int) -> bool:
        """Whether a layer has a feed-forward half."""
        return not self.halves or self.halves[layer] != "mixer"

    def norm_names(self, layer: int) -> list[str]:
        """Names of the norms of a layer's hidden states."""
        n = self.names_of(layer)
        made = [n.attention_norm, n.attention_post_norm] * self.has_mixer(layer)
        return [name for name in made + [n.feed_forward_norm, n.feed_forward_post_norm]
                * self.has_feed_forward(layer) if name]

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have attention, and so keys and values of each token."""
        return tuple(i for i in range(self.num_layers) if self.has_attention(i))

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention, alone or beside a mixer."""
        mixer = self.mixer(layer)
        return self.has_mixer(layer) and (mixer is None or isinstance(mixer, BesideConfig))

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """The windows of the layers that have attention."""
        return tuple(self.windows[i] for i in self.attention_layers)

    def state_shapes(self, dtype: DType) -> dict[int, tuple[tuple[tuple[int, ...], DType], ...]]:
        """Shapes and dtypes of the states of a sequence, by layer, in a model of a dtype."""
        return {i: tuple((each.shape, each.dtype or dtype) for each in mixer.states)
                for i, mixer in enumerate(self.mixers) if mixer is not None}

    def state_bytes(self, dtype: DType) -> int:
        """Bytes of a sequence's states in all layers."""
        return sum(each.nbytes(dtype) for mixer in self.mixers if mixer is not None for each in mixer.states)

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state of each sequence."""
        return any(each is not None for each in self.mixers)

    @property
    def kv_shape(self) -> KVShape:
        """Shape of a token's keys and values in the cache of one layer."""
        if self.latent is not None: return KVShape(1, self.latent.width, 0)
        return KVShape(self.num_kv_heads, self.head_dim, self.head_dim)

    @property
    def attention_width(self) -> int:
        """Elements of a token's queries, keys and values in one layer."""
        if self.latent is None:
            made = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim + self._attention_gates
        else:   # queries, absorbed ones and what is weighted; the cache's vector
            each = self.latent.head + self.latent.width + self.latent.rank
            made = self.num_heads * each + self.latent.width
        return max([made, *(each.width for each in self.mixers if each is not None)])

    @property
    def _attention_gates(self) -> int:
        """Elements of a token's gates in one layer's attention."""
        if not self.gated_attention: return 0
        return self.num_heads * (1 if self.gated_attention == "heads" else self.head_dim)

    @property
    def _attention_parameters(self) -> int:
        """Number of parameters of one layer's attention."""
        if self.latent is not None:
            made = self.latent.parameters(self.hidden_size, self.num_heads)
            return made + self.hidden_size * (self.num_heads * self.latent.value + self.output_bias)
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        made = self.hidden_size * (2 * q + 2 * kv + self.output_bias) + (q + 2 * kv) * self.qkv_bias
        made += self._attention_gates * (self.hidden_size + self.qkv_bias)
        made += self.num_heads * self.sinks
        return made + {"": 0, "unit": 0, "head": 2 * self.head_dim, "all": q + kv}[self.qk_norm]

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        mixing = len(self.attention_layers) * self._attention_parameters
        mixing += sum(each.parameters(self.hidden_size) for each in self.mixers if each is not None)
        norms = self.hidden_size * sum(len(self.norm_names(i)) for i in range(self.num_layers))
        forward = [i for i in range(self.num_layers) if self.has_feed_forward(i)]
        inner = (1 + self.mlp_gated) * self.intermediate_size
        dense = self.hidden_size * (inner + self.intermediate_size)
        dense += (inner + self.hidden_size) * self.mlp_bias
        mixtures = 0 if self.moe is None else sum(self.moe.layers[i] for i in forward)
        made = mixing + norms + (len(forward) - mixtures) * dense
        if self.moe is not None:
            made += mixtures * self.moe.parameters(self.hidden_size)
            width, latent = self.moe.shared_width, self.moe.latent
            shared = (1 + self.moe.gated) * width + self.hidden_size if width else 0
            made += mixtures * (shared + (latent + self.hidden_size if latent else 0)) * self.mlp_bias
        return made + self.hidden_size * (self.vocab_size * (2 - self.tied) + 1)

    def inactive_parameters(self, tokens: int = 1) -> int:
        """Expected parameters of experts that none of `tokens` tokens has."""
        if self.moe is None: return 0
        return round(sum(self.moe.layers) * self.moe.inactive(self.hidden_size, tokens))


def read_json(path: Path, most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON object from `path`, of at most `most` bytes. Raises `ModelError` with the file and the position
    of an error."""
    if isinstance(data := read_json_value(path, most), dict): return data
    raise ModelError(f"{path} holds a {type(data).__name__}", "a JSON object", "download the file again")


def read_json_value(path: Path, most: int = MAX_JSON_BYTES) -> Any:
    """Any JSON value from `path`. Raises `ModelError`."""
    try: return files.read_json(path, most)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}", "a readable UTF-8 text file",
                         "check its permissions, or download the file again") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}", "a JSON object",
                         "download the file again") from error


def read_architectures(directory: Path) -> list[Any]:
    """The architectures that config.json names, none where there is no such file. Raises `ModelError`."""
    path = directory / "config.json"
    # unlike Path.is_file, False for a name too long for the system
    return architectures_of(read_json(path)) if os.path.isfile(path) else []


def is_generative(directory: Path) -> bool:
    """Tells, by config.json alone, whether a directory surely has a model that generates text, and no
    embedding model."""
    found = read_architectures(directory)
    return bool(found) and all(each in FAMILIES for each in found) \
        and not os.path.isfile(directory / "modules.json")


def read_config(directory: Path, embeds: bool = False) -> ModelConfig:
    """The configuration of the model in `directory`. Raises `ModelError` naming what is missing or not
    supported. `embeds` as `parse_config` has it."""
    if not os.path.exists(directory):  # unlike Path.exists, False for a name too long for the system
        raise ModelError(f"no such directory: {directory}",
                         "a Hugging Face model directory (config.json, weights), or a GGUF file",
                         "check the path; models are not downloaded")
    if (file := find_gguf(directory)) is not None:
        from tinygrad_nv.quant.gguf.file import open_gguf

        from .gguf import config_of
        return parse_config(config_of(open_gguf(file)), str(file), embeds=embeds)
    _require_no_adapter(directory)
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(f"{directory} has no config.json", "a Hugging Face model directory",
                         "point MODEL at the folder that holds config.json")
    data, theirs = read_json(path), directory / "hf_quant_config.json"
    # ModelOpt's first versions say in a file of its own how weights are quantised
    if not data.get("quantization_config") and theirs.is_file():
        data["quantization_config"] = {"quant_method": "modelopt", **read_json(theirs)}
    return parse_config(data, str(path), embeds=embeds)


def _require_no_adapter(directory: Path) -> None:
    """Refuses an adapter, also one beside the weights of its model: transformers would apply it."""
    path = directory / "adapter_config.json"
    if not path.is_file(): return
    adapter = read_json(path)
    kind, base = str(adapter.get("peft_type", "LoRA"))[:40], str(adapter.get("base_model_name_or_path"))[:200]
    if kind == "LORA": kind = "LoRA"
    served = f"serve its model with --lora-modules NAME={directory}; or " * (kind == "LoRA")
    raise ModelError(f"{directory} is an adapter ({kind}) of the model {base}, and no model",
                     "a Hugging Face model directory, without adapter_config.json",
                     f"{served}merge it into its model with PEFT's merge_and_unload, save the result with "
                     "save_pretrained, and name that directory")


def parse_config(data: Mapping[str, Any], name: str = "config.json", family: Family | None = None,
                 embeds: bool = False) -> ModelConfig:
    """`read_config` for an object already read; `name` is used in messages. `family` stands for that of its
    architecture; `embeds`: it generates no text, so it need not be causal."""
    data = language_config(data, name)
    if family is None: family = FAMILIES[_architecture(data, name)]
    raw = family.complete(Fields({**family.defaults, **data}, name)).raw
    _require_implemented(raw, family.honours, name)
    f = Fields(raw, name)
    hidden, heads = f.positive("hidden_size"), f.positive("num_attention_heads")
    key = family.head_dim
    if raw.get(key) is None and hidden % heads:
        raise ModelError(f"{name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}",
                         f"a multiple, or an explicit {key}")
    head_dim = f.positive(key) if raw.get(key) is not None else hidden // heads
    kv_heads = heads if raw.get("num_key_value_heads") is None else f.positive("num_key_value_heads")
    if heads % kv_heads:
        raise ModelError(f"{name}: num_attention_heads {heads} is not a multiple of "
                         f"num_key_value_heads {kv_heads}",
                         "each key/value head shared by the same number of query heads")
    if raw.get("sliding_window"): f.positive("sliding_window")     # some write 0 for none
    f, layers = f.within({"head_dim": head_dim}), f.positive("num_hidden_layers")
    bias, positions = f.flag("attention_bias"), f.positive("max_position_embeddings")
    settings = family.settings(f)
    if "ropes" not in settings: settings["ropes"] = (rope_config(f, rope_parameters(f), head_dim),) * layers
    if not raw.get("is_causal", True):      # transformers' windows are wider by one then
        settings |= {"causal": False, "windows": tuple(
            None if each is None else each + 1 for each in settings.get("windows", (None,) * layers))}
    if not embeds and not settings.get("causal", True): _refuse_both_directions(raw, name)
    common = {
        "architecture": family.architecture, "vocab_size": f.positive("vocab_size"), "hidden_size": hidden,
        "intermediate_size": f.positive("intermediate_size"), "num_layers": layers, "num_heads": heads,
        "num_kv_heads": kv_heads, "head_dim": head_dim, "max_positions": positions,
        "norm_eps": Fields({"rms_norm_eps": 1e-6, **raw}, name).number("rms_norm_eps"),
        "activation": settings.get("activation") or activation(f, "hidden_act"),
        "tied": f.flag("tie_word_embeddings"),
        "qkv_bias": bias, "output_bias": bias, "windows": (None,) * layers, "dtype": config_dtype(raw, name),
        "eos_token_ids": token_ids(raw.get("eos_token_id"), f"{name}: eos_token_id"),
        "quantization": _quantization(raw, name)}
    return ModelConfig(**{**common, **settings})


def _require_implemented(raw: Mapping[str, Any], honours: frozenset[str], name: str) -> None:
    """Refuses fields by name that change what is computed."""
    found = [key for key in REFUSED if raw.get(key) and key not in honours]
    if found:
        raise ModelError(f"{name}: {found[0]} is {brief(raw[found[0]])}, which is not implemented",
                         "a model without it", "use a model of a supported family as it was published")


def _refuse_both_directions(raw: Mapping[str, Any], name: str) -> None:
    key = "use_bidirectional_attention" if raw.get("is_causal", True) else "is_causal"
    raise ModelError(f"{name}: {key} is {brief(raw.get(key))}, which is not implemented for models that "
                     "generate", "a model without it",
                     "load it for embeddings: task=\"embed\", or --task embed")


def _quantization(raw: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Returns a checkpoint's settings of its quantised weights."""
    # llmcompressor's first files have another name for it
    if not (given := raw.get("quantization_config") or raw.get("compression_config")): return None
    if not isinstance(given, dict):
        raise ModelError(f"{name}: quantization_config is {brief(given)}", "an object with a quant_method",
                         "correct the file, or download it again")
    from tinygrad_nv.quant.readers.reader import require_known
    require_known(given, name)
    return given


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """An id, a list of ids or null, as a tuple."""
    values = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
        raise ModelError(f"{name} is {brief(value)}", "a token id, a list of them, or null",
                         "correct the file")
    return values


def _architecture(data: Mapping[str, Any], name: str) -> str:
    if not (listed := architectures_of(data)):
        raise ModelError(f"{name} names no architectures", f"a list with one of: {', '.join(FAMILIES)}",
                         "use a causal language model saved by transformers")
    if (known := next((a for a in listed if isinstance(a, str) and a in FAMILIES), None)) is None:
        from .families.encoder import ENCODERS
        raise ModelError(f"{name}: architecture {shorten(', '.join(map(str, listed)))} is not supported",
                         f"one of: {', '.join(FAMILIES)}",
                         "use `tinygrad-nv transcribe`" if data.get("model_type") == "whisper" else
                         "convert the model to one of these, or add it (see CONTRIBUTING.md); of embedding "
                         f"models there are: {', '.join(ENCODERS)}")
    return known


def config_dtype(raw: Mapping[str, Any], name: str) -> str | None:
    """The dtype of config.json, None where it names none. Raises `ModelError`."""
    if not (given := raw.get("dtype") or raw.get("torch_dtype")): return None
    dtype = str(given).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"{name}: dtype {brief(dtype)} is not supported", f"one of: {', '.join(DTYPES)}")
    return dtype


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` is, or the only one in a directory without config.json; of a model in several
    files one of them. Raises `ModelError` for several models."""
    if path.is_file():
        try:
            with path.open("rb") as file: start = file.read(4)
        except OSError: start = b""
        return path if start == b"GGUF" or path.suffix.lower() == ".gguf" else None
    if not path.is_dir() or (path / "config.json").is_file(): return None
    found = sorted(each for each in path.glob("*") if each.suffix.lower() == ".gguf")
    if not found: return None
    from tinygrad_nv.quant.gguf.file import parts_of
    if len({parts_of(each)[0] for each in found}) > 1:
        raise ModelError(f"{path} holds {len(found)} GGUF files ({found[0].name}, {found[1].name}, …)",
                         "one, or the name of one", f"name the file: {found[0]}")
    return found[0]
