"""Configuration of images in a Qwen2.5-VL directory, checked.

Protocol: `read_vision(directory)` is None for a model that reads text alone. Published files have the
language model's fields beside vision_config, transformers 5 has them in text_config. Limits of image sizes
come from preprocessor_config.json, or from processor_config.json, which transformers 5 writes; without either
they are those of transformers' image processor.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinygrad_nv.errors import ModelError, brief

from ..config import find_gguf, read_json
from ..fields import CORRECT, Fields
from ..model_types import architectures_of
from ..multimodal import QWEN_VL, language_config

# means and standard deviations of CLIP's training images, by channel
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
VISION = {"in_channels": 3, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2,
          "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu"}
IMAGE = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255,
         "image_mean": MEAN, "image_std": STD}
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
MOST_PIXELS = 1 << 24   # limit: pixels that images of a vision model are resized to; published: 2^23.6
BICUBIC = 3     # PIL's number


@dataclass(frozen=True)
class ImageConfig:
    """How images become pixels: an image is resized to between `min_pixels` and `max_pixels`; its channels
    have `mean` subtracted and are divided by `std`, both of values 0 … 1."""
    min_pixels: int = MIN_PIXELS
    max_pixels: int = MAX_PIXELS
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD


@dataclass(frozen=True)
class VisionConfig:
    """A vision tower, and how its rows enter a prompt. Patches have `patch` × `patch` pixels of `frames`
    frames; `merge` × `merge` of them make a row of the language model's width, `out`. Layers not in `full`
    attend in windows of `window` × `window` pixels. A token `image_token` stands for each row. `sections` are
    the pairs of a head's dimensions that are rotated by the temporal, the vertical and the horizontal
    position."""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    out: int
    channels: int
    patch: int
    frames: int
    merge: int
    window: int
    full: tuple[int, ...]
    image_token: int
    sections: tuple[int, ...]
    images: ImageConfig = field(default_factory=ImageConfig)

    @property
    def unit(self) -> int:
        """Patches of a row."""
        return self.merge * self.merge

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.frames * self.patch * self.patch

    @property
    def window_rows(self) -> int:
        """Rows along an edge of a window."""
        return self.window // self.patch // self.merge


def read_vision(directory: Path) -> VisionConfig | None:
    """The vision part of the model in `directory`, or None. Raises `ModelError`."""
    path = directory / "config.json"
    if not path.is_file() or find_gguf(directory) is not None: return None
    data = read_json(path)
    if QWEN_VL not in architectures_of(data): return None
    made = parse_vision(data, str(path), image_config(directory))
    _require_language(made, Fields(language_config(data, str(path)), str(path)))
    return made


def _require_language(c: VisionConfig, f: Fields) -> None:
    """Raises `ModelError` for rows that the language model of `f` does not take."""
    hidden, heads = f.positive("hidden_size"), f.positive("num_attention_heads")
    head = hidden // heads if f.get("head_dim") is None else f.positive("head_dim")
    if c.out != hidden:
        raise ModelError(f"{f.name}: out_hidden_size of vision_config is {c.out}",
                         f"hidden_size of the language model, {hidden}", CORRECT)
    if 2 * sum(c.sections) != head:
        raise ModelError(f"{f.name}: mrope_section is {brief(list(c.sections))}",
                         f"numbers whose sum is {head // 2}, the pairs of a head's dimensions", CORRECT)


def parse_vision(data: Mapping[str, Any], name: str, images: ImageConfig) -> VisionConfig:
    """`read_vision` of an object already read; `name` is used in messages."""
    given = data.get("vision_config")
    if not isinstance(given, dict): raise ModelError(f"{name}: vision_config is {brief(given)}", "an object")
    f = Fields({**VISION, **given}, f"{name}: vision_config")
    if f.get("hidden_act") != "silu":
        raise ModelError(f"{f.name}: hidden_act is {brief(f.get('hidden_act'))}", "silu")
    if (channels := f.positive("in_channels")) != 3:
        raise ModelError(f"{f.name}: in_channels is {channels}", "3: red, green and blue")
    full = f.layers("fullatt_block_indexes")
    made = VisionConfig(
        f.positive("depth"), f.positive("hidden_size"), f.positive("intermediate_size"),
        f.positive("num_heads"), f.positive("out_hidden_size"), channels,
        f.positive("patch_size"), f.positive("temporal_patch_size"), f.positive("spatial_merge_size"),
        f.positive("window_size"), tuple(i for i in range(f.positive("depth")) if i in full),
        Fields({"image_token_id": 151655, **data}, name).positive("image_token_id"),
        _sections(data, name), images)
    if made.hidden % (4 * made.heads):
        raise ModelError(f"{f.name}: hidden_size {made.hidden} over {made.heads} heads",
                         "heads of a multiple of 4 elements: half of them rotate by rows, half by columns")
    if made.window_rows < 1:
        raise ModelError(f"{f.name}: window_size is {made.window}",
                         f"at least {made.patch * made.merge}, the patches of a row")
    return made


def _sections(data: Mapping[str, Any], name: str) -> tuple[int, ...]:
    text = data.get("text_config") or data
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    sections = rope.get("mrope_section") if isinstance(rope, dict) else None
    if not isinstance(sections, list) or len(sections) != 3 or \
            not all(type(each) is int and each >= 0 for each in sections):
        raise ModelError(f"{name}: mrope_section is {brief(sections)}",
                         "three numbers: pairs of dimensions that rotate by time, row and column")
    return tuple(sections)


def image_config(directory: Path) -> ImageConfig:
    """How the model in `directory` wants images. Raises `ModelError`."""
    path, data = directory / "preprocessor_config.json", dict[str, Any]()
    if path.is_file(): data = read_json(path)
    elif (path := directory / "processor_config.json").is_file():
        data = dict(Fields(read_json(path), str(path)).section("image_processor"))
    f = Fields({**IMAGE, **{key: value for key, value in data.items() if value is not None}}, str(path))
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if f.get(key) is not True: raise ModelError(f"{path}: {key} is {brief(f.get(key))}", "true")
    if data.get("resample", BICUBIC) != BICUBIC:
        raise ModelError(f"{path}: resample is {brief(data['resample'])}", f"{BICUBIC}, bicubic")
    size = Fields(f.section("size"), f"{path}: size")
    least, most = (next((section.positive(name) for section, name in ((f, own), (size, edge))
                         if section.get(name)), default)
                   for own, edge, default in (("min_pixels", "shortest_edge", MIN_PIXELS),
                                              ("max_pixels", "longest_edge", MAX_PIXELS)))
    if not least <= most <= MOST_PIXELS:
        raise ModelError(f"{path}: images have from {least} to {most} pixels",
                         f"min_pixels, and as many or more max_pixels, at most {MOST_PIXELS:,}", CORRECT)
    return ImageConfig(least, most, _channels(f, "image_mean", zero=True), _channels(f, "image_std"))


def _channels(f: Fields, key: str, zero: bool = False) -> tuple[float, ...]:
    """Three numbers above 0, or 0 where that is allowed."""
    found = f.get(key)
    if isinstance(found, list | tuple) and len(found) == 3:
        return tuple(Fields({key: each}, f.name).number(key, zero=zero) for each in found)
    raise ModelError(f"{f.name}: {key} is {brief(found)}",
                     "three numbers, one for each of red, green and blue")
