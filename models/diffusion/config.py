"""config.json of a directory's parts, checked, as frozen dataclasses.

Protocol: `read_…(directory)` reads one part. A field that changes what is computed and is not implemented
raises `ModelError` by name; `NEUTRAL` lists, of each part, the values that change nothing. Defaults are those
of the classes of diffusers and transformers.
"""
from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinygrad_nv.errors import ModelError, brief, shorten

from ..config import read_json
from ..fields import CORRECT, Fields, limit_of

MAX_BLOCKS = 16     # limit: blocks of a UNet or an autoencoder; published ones have 4
MAX_DEPTH = 1024    # limit: layers of all blocks of a UNet or an autoencoder, those of transformers counted
CROSS = {"CrossAttnDownBlock2D": True, "DownBlock2D": False, "CrossAttnUpBlock2D": True, "UpBlock2D": False}
UNET_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "center_input_sample": (False,), "only_cross_attention": (False,), "mid_block_scale_factor": (1, 1.0),
    "act_fn": ("silu", "swish"), "encoder_hid_dim": (), "encoder_hid_dim_type": (),
    "dual_cross_attention": (False,), "class_embed_type": (), "num_class_embeds": (),
    "resnet_time_scale_shift": ("default",), "resnet_skip_time_act": (False,),
    "resnet_out_scale_factor": (1, 1.0), "time_embedding_type": ("positional",), "time_embedding_dim": (),
    "time_embedding_act_fn": (), "timestep_post_act": (), "time_cond_proj_dim": (), "conv_in_kernel": (3,),
    "conv_out_kernel": (3,), "attention_type": ("default",), "class_embeddings_concat": (False,),
    "mid_block_only_cross_attention": (False,), "cross_attention_norm": (),
    "reverse_transformer_layers_per_block": (), "num_attention_heads": (),
    "mid_block_type": ("UNetMidBlock2DCrossAttn",), "addition_embed_type": ("text_time",)}
VAE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "act_fn": ("silu", "swish"), "shift_factor": (0, 0.0), "latents_mean": (), "latents_std": ()}


@dataclass(frozen=True)
class TextConfig:
    """A CLIP text encoder. `projection`: elements of the pooled state's projection, 0 without one."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    norm_eps: float
    activation: str
    eos_token_id: int
    projection: int


@dataclass(frozen=True)
class UNetConfig:
    """The UNet. Of each block from the largest images to the smallest: output channels, layers, whether it
    has cross-attention, layers of its transformers, heads. `added`: elements of each of XL's six time ids, 0
    without them; `added_width`: what their embedding reads."""
    in_channels: int
    out_channels: int
    sample_size: int
    channels: tuple[int, ...]
    layers: tuple[int, ...]
    cross: tuple[bool, ...]
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    context: int
    groups: int
    norm_eps: float
    flip_sin_to_cos: bool
    freq_shift: float
    down_padding: int
    added: int
    added_width: int

    @property
    def time_width(self) -> int:
        """Elements of the time embedding."""
        return 4 * self.channels[0]


@dataclass(frozen=True)
class VAEConfig:
    """The autoencoder. `latents · 1 / scaling` is what is decoded."""
    in_channels: int
    out_channels: int
    latent_channels: int
    channels: tuple[int, ...]
    layers: int
    groups: int
    scaling: float
    sample_size: int
    force_upcast: bool
    quant: bool
    post_quant: bool
    mid_attention: bool

    @property
    def factor(self) -> int:
        """Pixels of an image for each of its latents, along a side."""
        return 1 << len(self.channels) - 1


def read_text(directory: Path) -> TextConfig:
    """Reads the configuration of a text encoder. Raises `ModelError`."""
    f = _read(directory, {"vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048,
                          "num_hidden_layers": 12, "num_attention_heads": 8, "max_position_embeddings": 77,
                          "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu", "eos_token_id": 49407,
                          "projection_dim": 512}, {})
    listed = f.get("architectures") or ["CLIPTextModel"]
    architecture = listed[0] if isinstance(listed, list) else listed
    if architecture not in ("CLIPTextModel", "CLIPTextModelWithProjection"):
        raise ModelError(f"{f.name}: architecture {brief(architecture)}",
                         "CLIPTextModel or CLIPTextModelWithProjection", "choose another model")
    act = f.one_of("hidden_act", ("quick_gelu", "gelu"))
    projected, hidden, heads = architecture.endswith("WithProjection"), f.positive("hidden_size"), \
        f.positive("num_attention_heads")
    if hidden % heads: raise _uneven(f, f"hidden_size {hidden}", f"num_attention_heads, {heads}")
    return TextConfig(f.positive("vocab_size"), hidden, f.positive("intermediate_size"),
                      f.positive("num_hidden_layers"), heads, f.positive("max_position_embeddings"),
                      f.number("layer_norm_eps"), act, f.positive("eos_token_id"),
                      f.positive("projection_dim") if projected else 0)


def read_unet(directory: Path) -> UNetConfig:
    """Reads the configuration of a UNet2DConditionModel. Raises `ModelError`."""
    f = _read(directory, {
        "in_channels": 4, "out_channels": 4, "sample_size": 64, "norm_num_groups": 32, "norm_eps": 1e-5,
        "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
        "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3], "layers_per_block": 2,
        "block_out_channels": [320, 640, 1280, 1280], "transformer_layers_per_block": 1,
        "attention_head_dim": 8, "cross_attention_dim": 1280, "flip_sin_to_cos": True, "freq_shift": 0,
        "downsample_padding": 1}, UNET_NEUTRAL)
    channels = _channels(f)
    down, up = _texts(f, "down_block_types"), _texts(f, "up_block_types")
    for kind in (*down, *up):
        if kind not in CROSS: raise ModelError(f"{f.name}: a block of {shorten(kind)}", ", ".join(CROSS))
    cross = tuple(CROSS[kind] for kind in down)
    if [CROSS[kind] for kind in reversed(up)] != [*cross] or len(cross) != len(channels):
        raise ModelError(f"{f.name}: blocks {brief(down)}, then {brief(up)}",
                         f"{len(channels)} each, the same ones in reverse", CORRECT)
    added, heads = f.get("addition_embed_type") is not None, _each(f, "attention_head_dim", len(channels))
    for width, count in zip(channels, heads, strict=True):
        if width % count: raise _uneven(f, f"block_out_channels {width}", f"attention_head_dim, {count}")
    layers = _each(f, "layers_per_block", len(channels))
    depths = _each(f, "transformer_layers_per_block", len(channels))
    _require_few(f, sum(map(operator.mul, layers, depths)))
    return UNetConfig(f.positive("in_channels"), f.positive("out_channels"), f.positive("sample_size"),
                      channels, layers, cross, depths, heads, f.positive("cross_attention_dim"),
                      f.positive("norm_num_groups"), f.number("norm_eps"), f.flag("flip_sin_to_cos"),
                      f.number("freq_shift", zero=True), int(f.number("downsample_padding", zero=True)),
                      f.positive("addition_time_embed_dim") if added else 0,
                      f.positive("projection_class_embeddings_input_dim") if added else 0)


def read_vae(directory: Path) -> VAEConfig:
    """Reads the configuration of an AutoencoderKL. Raises `ModelError`."""
    f = _read(directory, {
        "in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": [64],
        "layers_per_block": 1, "norm_num_groups": 32, "sample_size": 32, "scaling_factor": 0.18215,
        "force_upcast": True, "use_quant_conv": True, "use_post_quant_conv": True,
        "mid_block_add_attention": True}, VAE_NEUTRAL)
    for name, kind in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
        if f.get(name) is not None and set(_texts(f, name)) != {kind}:
            raise ModelError(f"{f.name}: {name} {brief(f.get(name))}", kind)
    channels, layers = _channels(f), f.positive("layers_per_block")
    _require_few(f, len(channels) * layers)
    return VAEConfig(f.positive("in_channels"), f.positive("out_channels"), f.positive("latent_channels"),
                     channels, layers,
                     f.positive("norm_num_groups"), f.number("scaling_factor"), f.positive("sample_size"),
                     f.flag("force_upcast"), f.flag("use_quant_conv"), f.flag("use_post_quant_conv"),
                     f.flag("mid_block_add_attention"))


def _read(directory: Path, defaults: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> Fields:
    """The fields of a directory's config.json. Raises `ModelError` for one that is not implemented."""
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(f"{directory} has no config.json", "a part of a diffusers directory",
                         "download the directory again")
    data = read_json(path)
    for name, values in neutral.items():
        value = data.get(name)
        if value is not None and value not in values:
            accepted = " or ".join(map(repr, values)) or "no such field"
            raise ModelError(f"{path}: {name} is {brief(value)}, which is not implemented", accepted,
                             "choose another model")
    return Fields({**defaults, **{k: v for k, v in data.items() if v is not None}}, str(path))


def _channels(f: Fields) -> tuple[int, ...]:
    """Channels of each block, which norm_num_groups divide. Raises `ModelError`."""
    value, groups = f.get("block_out_channels"), f.positive("norm_num_groups")
    if not isinstance(value, list) or not 0 < len(value) <= MAX_BLOCKS:
        raise ModelError(f"{f.name}: block_out_channels is {brief(value)}",
                         f"a list of at most {MAX_BLOCKS} positive integers", CORRECT)
    made = _each(f, "block_out_channels", len(value))
    for each in made:
        if each % groups: raise _uneven(f, f"block_out_channels {each}", f"norm_num_groups, {groups}")
    return made


def _texts(f: Fields, key: str) -> list[str]:
    value = f.get(key)
    if isinstance(value, list) and all(isinstance(each, str) for each in value): return value
    raise ModelError(f"{f.name}: {key} is {brief(value)}", "a list of names of blocks", CORRECT)


def _uneven(f: Fields, found: str, divisor: str) -> ModelError:
    return ModelError(f"{f.name}: {found}", f"a multiple of {divisor}", CORRECT)


def _each(f: Fields, key: str, count: int) -> tuple[int, ...]:
    """A number for each block, of one for all or of a list. Raises `ModelError`."""
    value, most = f.get(key), limit_of(key)
    made = tuple(value) if isinstance(value, list) else (value,) * count
    if len(made) == count and all(type(each) is int and 0 < each <= most for each in made): return made
    raise ModelError(f"{f.name}: {key} is {brief(value)}",
                     f"a positive integer, or {count} of them, at most {most:,}", CORRECT)


def _require_few(f: Fields, layers: int) -> None:
    if layers > MAX_DEPTH:
        raise ModelError(f"{f.name}: layers_per_block is {brief(f.get('layers_per_block'))}, and the blocks "
                         f"have {layers} layers together", f"at most {MAX_DEPTH}", CORRECT)
