"""Prompts with images, vision configs, directories of Stable Diffusion and requests for images that are
refused."""
from __future__ import annotations

import builtins
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tinygrad import Tensor, dtypes

from tests.support.models import diffusion_case as case
from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.prompts import parse
from tinygrad_nv.engine.vision.images import MAX_PIXELS, as_image, decode_image, from_url
from tinygrad_nv.engine.vision.parts import with_placeholders
from tinygrad_nv.engine.vision.prompt import require_placeholders
from tinygrad_nv.errors import (
    ModelError,
    NVError,
    RequestError,
    SpecError,
    TokenizerError,
    ToolchainError,
    WeightError,
)
from tinygrad_nv.functional import convolution, group_norm
from tinygrad_nv.models.diffusion import png
from tinygrad_nv.models.diffusion.config import read_text, read_unet, read_vae
from tinygrad_nv.models.diffusion.pipeline import ImageParams, StableDiffusion
from tinygrad_nv.models.diffusion.schedulers import DEFAULTS, SchedulerConfig, plan, read_scheduler
from tinygrad_nv.models.qwen_vl.config import ImageConfig, image_config, parse_vision
from tinygrad_nv.models.qwen_vl.images import fit_size
from tinygrad_nv.server.errors import APIError
from tinygrad_nv.server.images import parse_request

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


# **** images out ****

def told(kind: type[NVError], *words: str) -> Any:
    """An error of a kind, with these words in this order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(words))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A directory that may be changed."""
    return Path(shutil.copytree(case.directory(), tmp_path / "model"))


def changed(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_directories(copy, tmp_path):
    with told(ModelError, "has no model_index.json", "a diffusers directory", "check the path"):
        StableDiffusion(tmp_path)
    changed(copy / "model_index.json", _class_name="FluxPipeline")
    with told(ModelError, "a FluxPipeline", "StableDiffusionPipeline or StableDiffusionXLPipeline"):
        StableDiffusion(copy)
    changed(copy / "model_index.json", _class_name="StableDiffusionXLPipeline")
    with told(ModelError, "text_encoder_2 has no config.json"): StableDiffusion(copy)


def test_parts_that_do_not_fit_each_other(copy):
    changed(copy / "unet" / "config.json", cross_attention_dim=48)
    with told(ModelError, "text encoders of 32 elements together", "the 48 of the UNet's"):
        StableDiffusion(copy)


@pytest.mark.parametrize(("part", "fields", "words"), [
    ("unet", {"class_embed_type": "timestep"}, ("class_embed_type is 'timestep'", "not implemented")),
    ("unet", {"addition_embed_type": "image"}, ("addition_embed_type is 'image'", "'text_time'")),
    ("unet", {"down_block_types": ["AttnDownBlock2D", "DownBlock2D"]}, ("a block of AttnDownBlock2D",)),
    ("unet", {"up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"]}, ("the same ones in reverse",)),
    ("unet", {"layers_per_block": [1, 0]}, (r"layers_per_block is \[1, 0\]", "2 of them")),
    ("unet", {"block_out_channels": [32, "x"]}, ("block_out_channels is", "positive integer")),
    ("unet", {"norm_num_groups": 7}, ("block_out_channels 32", "a multiple of norm_num_groups, 7")),
    ("unet", {"attention_head_dim": 5}, ("a multiple of attention_head_dim, 5",)),
    ("unet", {"freq_shift": "x"}, ("freq_shift is 'x'",)),
    ("unet", {"down_block_types": 3}, ("down_block_types is 3",)),
    ("vae", {"block_out_channels": []}, (r"block_out_channels is \[\]",)),
    ("text_encoder", {"eos_token_id": [1]}, (r"eos_token_id is \[1\]",)),
    ("text_encoder", {"num_attention_heads": 5}, ("a multiple of num_attention_heads, 5",)),
    ("vae", {"shift_factor": 0.5}, ("shift_factor is 0.5",)),
    ("vae", {"down_block_types": ["X"]}, (r"down_block_types \['X'\]", "DownEncoderBlock2D")),
    ("text_encoder", {"hidden_act": "relu"}, ("hidden_act 'relu'", "one of: quick_gelu, gelu")),
    ("text_encoder", {"architectures": ["T5"]}, ("architecture 'T5'", "CLIPTextModel"))])
def test_configurations(copy, part, fields, words):
    changed(copy / part / "config.json", **fields)
    with told(ModelError, *words): {"unet": read_unet, "vae": read_vae, "text_encoder": read_text}[part](
        copy / part)


def test_schedulers(copy, tmp_path):
    with told(ModelError, "has no scheduler_config.json"): read_scheduler(tmp_path)
    path = copy / "scheduler" / "scheduler_config.json"
    changed(path, thresholding=True)
    with told(ModelError, "thresholding is True", "False"): read_scheduler(path.parent)
    for fields, words in (({"_class_name": "LCMScheduler"}, ("a LCMScheduler", "DDIMScheduler")),
                          ({"num_train_timesteps": "x"}, ("num_train_timesteps is 'x'",)),
                          ({"num_train_timesteps": 10**6}, ("at most 65,536",)),
                          ({"beta_end": 2.0}, ("beta_end 2", "below 1")),
                          ({"prediction_type": "sample"}, ("prediction_type 'sample'", "epsilon, v_pred")),
                          ({"beta_schedule": []}, (r"beta_schedule \[\] is not", "scaled_linear")),
                          ({"final_sigmas_type": {}}, ("final_sigmas_type {} is not", "sigma_min")),
                          ({"timestep_spacing": ["x"]}, (r"timestep_spacing \['x'\]", "trailing"))):
        (tmp_path / "scheduler_config.json").write_text(json.dumps(fields))
        with told(ModelError, *words): read_scheduler(tmp_path)
    (tmp_path / "scheduler_config.json").write_text(json.dumps(dict.fromkeys(DEFAULTS)))
    assert read_scheduler(tmp_path) == SchedulerConfig()
    with told(RequestError, "1000 steps of dpm.*have one timestep", "fewer, such as 500"):
        plan(SchedulerConfig(), 1000, "dpm++")
    with told(RequestError, "2.5 steps"): plan(SchedulerConfig(), 2.5)      # type: ignore[arg-type]
    with told(RequestError, "the scheduler is 'heun'", "ddim, euler"): plan(SchedulerConfig(), 10, "heun")
    with told(RequestError, "1001 steps", "1 to 1000"): plan(SchedulerConfig(), 1001)


def test_weights_and_tokenizers(copy):
    (copy / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    with told(WeightError, "unet holds no weights", "diffusion_pytorch_model.safetensors"):
        StableDiffusion(copy)
    (copy / "tokenizer" / "tokenizer.json").write_text("{}")
    with told(TokenizerError, "cannot be read", "download"): StableDiffusion(copy)
    (copy / "tokenizer" / "tokenizer.json").unlink()
    with told(TokenizerError, "holds no tokenizer", "vocab.json and merges.txt"): StableDiffusion(copy)


def test_requests():
    model = StableDiffusion(case.directory())
    for params, words in ((ImageParams(height=33), "images of 16x33.*multiples of 2"),
                          (ImageParams(width=8192), "up to 4096"), (ImageParams(n=0), "n is 0.*1 or more"),
                          (ImageParams(guidance_scale=-1), "guidance_scale is -1.*0 to 100"),
                          (ImageParams(seed=-1), "the seed is -1.*0 to 2"),
                          (ImageParams(width=0), "images of 0x16"), (ImageParams(height=16.0), "16x16.0"),
                          (ImageParams(seed="x"), "the seed is 'x'"), (ImageParams(n=1.5), "n is 1.5"),
                          (ImageParams(negative_prompt="\ud800"), "a prompt .*text in Unicode"),
                          (ImageParams(guidance_scale="x"), "guidance_scale is 'x'")):
        with told(RequestError, words): model.generate("a cat", params)
    with told(RequestError, "prompts of type int", "a list of texts"): model.generate(5)
    with told(RequestError, "a prompt 5", "text"): model.generate(["a", 5])
    with told(RequestError, "dtype dtypes.int", "dtypes.float"):
        StableDiffusion(case.directory(), dtype=dtypes.int32)
    with told(RequestError, "no prompts", "at least one"): model.generate([])
    with told(RequestError, "tiles of 3 latents", "4 or more"): StableDiffusion(case.directory(), tile=3)
    with told(RequestError, r"latents of shape \(1, 4, 4, 4\)", r"\(1, 4, 8, 8\)"):
        model.generate("a cat", latents=np.zeros((1, 4, 4, 4), np.float32))


def test_functions():
    x, w = Tensor.zeros(1, 4, 5, 3), Tensor.zeros(2, 3, 3, 3)
    for given, options, words in (
            ((x, w[..., :2]), {}, "images.*filters"), ((x.half(), w), {}, "of half, filters of float"),
            ((x, w), {"activation": "x"}, "activation='x'"), ((x, w), {"stride": (0, 1)}, "strides ≥ 1"),
            ((x[:, :2], w), {}, "filters 3x3 over images 2x5"), ((x, w, Tensor.zeros(3)), {}, r"bias \(3,\)"),
            ((x, w), {"residual": x}, "residual")):
        with told(SpecError, words): convolution(*given, **options)
    one = Tensor.ones(3)
    for given, words in (((x, 2, one, one), "2 groups of x"), ((x, 3, one[:2], one), "weight"),
                         ((x.int(), 3, one, one), "x of int"),
                         ((x, 3, one, one, 1e-5, "x"), "activation='x'"),
                         ((x, 3, one, one, 1e-5, "", one), r"shift \(3,\)")):
        with told(SpecError, words): group_norm(*given)


@pytest.mark.parametrize(("body", "words"), [
    ({}, "prompt is missing"), ({"prompt": "x" * 40000}, "40000 characters"),
    ({"prompt": "x", "size": "big"}, "size is 'big'"),
    ({"prompt": "x", "response_format": "url"}, "'url' is not served"),
    ({"prompt": "x", "output_format": "webp"}, "output_format is not png"),
    ({"prompt": "x", "stream": True}, "stream is not served"), ({"prompt": "x", "n": 11}, "n"),
    ({"prompt": "x", "scheduler": "heun"}, "scheduler"), ({"prompt": "x", "seed": -1}, "seed")])
def test_server_requests(body, words):
    with pytest.raises(APIError, match=words): parse_request(body)


def test_no_pillow(monkeypatch):
    imported = builtins.__import__

    def without(name: str, *given: Any, **more: Any) -> Any:
        if name.startswith("PIL"): raise ModelError("not this way")
        return imported(name, *given, **more)
    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with told(ToolchainError, "pillow is not installed", r"tinygrad-nv\[image\]"):
        png.png(np.zeros((2, 2, 3), np.uint8))
