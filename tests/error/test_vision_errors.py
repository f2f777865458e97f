"""Prompts with images that cannot be answered, and vision configs that cannot be read, say what to change."""
from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.prompts import parse
from tinygrad_nv.engine.vision.images import MAX_PIXELS, as_image, decode_image, from_url
from tinygrad_nv.engine.vision.parts import with_placeholders
from tinygrad_nv.engine.vision.prompt import require_placeholders
from tinygrad_nv.errors import ModelError, RequestError
from tinygrad_nv.models.qwen_vl.config import ImageConfig, image_config, parse_vision
from tinygrad_nv.models.qwen_vl.images import fit_size

IMAGE = np.zeros((30, 40, 3), np.uint8)
CONFIG = {"vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
                            "out_hidden_size": 32}, "rope_scaling": {"mrope_section": [2, 3, 3]}}


def test_a_model_of_text():
    with LLM(DEFAULT_MODEL, device="CPU", max_model_len=64, max_num_seqs=1) as llm, \
            pytest.raises(RequestError, match="a prompt with 1 images\n  expected: a prompt of text"):
        llm.generate({"prompt": "A fox", "multi_modal_data": {"image": IMAGE}})


@pytest.mark.parametrize(("given", "words"), [
    ({"prompt": "a", "multi_modal_data": {"audio": 1}}, "multi_modal_data of"),
    ({"prompt": "a", "multi_modal_data": {"image": "a.png"}}, "an image of type str"),
    ({"prompt": "a", "multi_modal_data": {"image": IMAGE.astype(float)}}, "dtype float64"),
    ({"messages": [{}], "multi_modal_data": {"image": IMAGE}}, "a prompt of type list")])
def test_prompts(given: dict[str, Any], words: str):
    with pytest.raises(RequestError, match=words): parse(given)


def test_placeholders():
    with pytest.raises(RequestError, match=r"1 image placeholders \(token 9\) and 2 images"):
        require_placeholders([1, 9], 9, 2)


def test_sizes():
    config = parse_vision(CONFIG, "config.json", ImageConfig())
    with pytest.raises(RequestError, match="a ratio of at most 200"): fit_size(10, 2001, config)
    with pytest.raises(RequestError, match=f"at most {MAX_PIXELS} pixels"):
        as_image(np.broadcast_to(np.uint8(0), (1 << 14, 1 << 13, 3)))


@pytest.mark.parametrize(("url", "words"), [
    ("https://a.org/b.png", "not downloaded"), ("data:image/png,a", "data:image/png;base64"),
    ("file:///none.png", "cannot be read"), ("data:;base64,AA==", "its format is not known"),
    ("data:;base64,\xe9", "no base64"), ("data:;base64,\ud800", "no base64"), ("http://[", "not downloaded"),
    ("file:///a%00b", "null byte"), ("file://[", "cannot be read"), ("", "a data URL")])
def test_urls(url: str, words: str):
    with pytest.raises(RequestError, match=words): from_url(url, local=True)


def test_files_that_other_programs_would_read():
    """pillow gives EPS to Ghostscript."""
    made = io.BytesIO()
    Image.fromarray(IMAGE).save(made, "EPS")
    with pytest.raises(RequestError, match="format is not known"): decode_image(made.getvalue())
    with pytest.raises(RequestError, match="at least one pixel"): as_image(Image.new("RGB", (0, 5)))


def test_parts():
    with pytest.raises(RequestError, match="without a URL"):
        with_placeholders({"content": [{"type": "image_url"}]})
    with pytest.raises(RequestError, match="'type': 'video'"):
        with_placeholders({"content": [{"type": "image", "image": IMAGE}, {"type": "video"}]})


@pytest.mark.parametrize(("change", "words"), [
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"), ({"fullatt_block_indexes": 3}, "fullatt_block_indexes"),
    ({"fullatt_block_indexes": None}, "fullatt_block_indexes is None"),
    ({"num_heads": 3}, "a multiple of 4"), ({"window_size": 20}, "window_size is 20"),
    ({"depth": 0}, "depth is 0"), ({"in_channels": 4}, "in_channels is 4")])
def test_vision_configs(change: dict[str, Any], words: str):
    config = {**CONFIG, "vision_config": {**CONFIG["vision_config"], **change}}
    with pytest.raises(ModelError, match=words): parse_vision(config, "config.json", ImageConfig())


def test_sections():
    with pytest.raises(ModelError, match="mrope_section is None"):
        parse_vision({**CONFIG, "rope_scaling": None}, "config.json", ImageConfig())


@pytest.mark.parametrize(("change", "words"), [
    ({"do_resize": False}, "do_resize is False"), ({"resample": 2}, "resample is 2"),
    ({"image_mean": [1]}, "image_mean is"), ({"min_pixels": -1}, "min_pixels is -1"),
    ({"size": [1]}, r"size is \[1\]"), ({"image_std": [1, 1, int("9" * 4000)]},
    "image_std is a number of thousands"),
    ({"image_std": [1, 1, 0]}, "image_std is 0"), ({"min_pixels": 9, "max_pixels": 8}, "from 9 to 8 pixels"),
    ({"max_pixels": 1 << 25}, "at most 16,777,216")])
def test_image_configs(tmp_path: Path, change: dict[str, Any], words: str):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(change))
    with pytest.raises(ModelError, match=words): image_config(tmp_path)
