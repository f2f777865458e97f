"""Stable Diffusion against diffusers and transformers, of small random networks; and served, with OpenAI's
client."""
from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file
from tinygrad import Tensor
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from tests.support.lazy import lazy
from tests.support.models import diffusion_case as case
from tinygrad_nv.models.diffusion import config, weights
from tinygrad_nv.models.diffusion.clip import TextEncoder
from tinygrad_nv.models.diffusion.pipeline import ImageParams, StableDiffusion
from tinygrad_nv.models.diffusion.schedulers import read_scheduler
from tinygrad_nv.models.diffusion.tokenizer import read_tokenizer
from tinygrad_nv.models.diffusion.unet import UNet
from tinygrad_nv.models.diffusion.vae import VAE, decode_tiles

CLOSE = 2e-4        # of outputs of about 1
LATENTS = 1e-3      # after 10 steps


def away(mine: Tensor, theirs: torch.Tensor) -> float:
    return float(np.abs(mine.numpy() - theirs.detach().numpy()).max())


@pytest.mark.parametrize("projected", [False, True])
def test_text_encoder(projected):
    torch.manual_seed(1)
    made = case.text_config(case.tokenizer(), hidden_act="gelu" if projected else "quick_gelu")
    theirs = (CLIPTextModelWithProjection if projected else CLIPTextModel)(made).eval()
    folder = case.saved(theirs)
    mine = TextEncoder(config.read_text(folder))
    weights.load(mine, folder)
    ids = torch.randint(0, made.eos_token_id, (2, case.LENGTH))
    ids[0, 5:] = ids[1, 11:] = made.eos_token_id
    with torch.no_grad(): wanted = theirs(ids, output_hidden_states=True)
    got = mine(Tensor(ids.numpy().astype(np.int32)))
    assert away(got.last, wanted.last_hidden_state) < CLOSE
    assert away(got.penultimate, wanted.hidden_states[-2]) < CLOSE
    assert away(got.pooled, wanted.text_embeds if projected else wanted.pooler_output) < CLOSE


@pytest.mark.parametrize("xl", [False, True])
def test_unet(xl):
    torch.manual_seed(2)
    theirs = case.unet(xl)
    folder = case.saved(theirs)
    mine = UNet(config.read_unet(folder))
    weights.load(mine, folder)
    # an odd side: the way up cuts off what the way down did not have
    x, times = torch.randn(2, 4, 8, 7), torch.tensor([7, 500])
    context, pooled = torch.randn(2, 5, mine.config.context), torch.randn(2, 16)
    sizes = torch.randint(0, 64, (2, 6)).float()
    with torch.no_grad():
        wanted = theirs(x, times, context,
                        added_cond_kwargs={"time_ids": sizes, "text_embeds": pooled}).sample
    added = mine.make_added_inputs(Tensor(pooled.numpy()), Tensor(sizes.numpy())) if xl else None
    got = mine(Tensor(case.nhwc(x)), Tensor(times.numpy()), Tensor(context.numpy()), added)
    assert away(got.permute(0, 3, 1, 2), wanted) < CLOSE


def test_vae():
    torch.manual_seed(3)
    theirs = case.vae()
    folder = case.saved(theirs)
    mine = VAE(config.read_vae(folder))
    weights.load(mine, folder)
    images, latents = torch.rand(1, 3, 16, 16) * 2 - 1, torch.randn(1, 4, 8, 8)
    with torch.no_grad(): wanted, found = theirs.encode(images).latent_dist, theirs.decode(latents).sample
    mean, log_variance = mine.encode(Tensor(case.nhwc(images)))
    assert away(mean.permute(0, 3, 1, 2), wanted.mean) < CLOSE
    assert away(log_variance.permute(0, 3, 1, 2), wanted.logvar) < CLOSE
    assert away(mine.decode(Tensor(case.nhwc(latents))).permute(0, 3, 1, 2), found) < CLOSE


def test_tiles_fade_as_those_of_diffusers():
    torch.manual_seed(4)
    theirs = case.vae()
    theirs.enable_tiling()      # tiles of 8 latents, from sample_size
    latents = torch.randn(1, 4, 13, 10)

    def decode(part: np.ndarray) -> np.ndarray:
        with torch.no_grad(): made = theirs.decoder(theirs.post_quant_conv(
            torch.tensor(part.transpose(2, 0, 1)[None])))
        return case.nhwc(made)[0]
    with torch.no_grad(): wanted = theirs.decode(latents).sample
    got = decode_tiles(case.nhwc(latents)[0], 8, 2, decode)
    assert np.abs(got - case.nhwc(wanted)[0]).max() < CLOSE
    assert decode_tiles(case.nhwc(latents)[0], 6, 2, decode).shape == (26, 20, 3)


@pytest.fixture(scope="module")
def models() -> dict[bool, StableDiffusion]:
    return {xl: StableDiffusion(case.directory(xl)) for xl in (False, True)}


def theirs_after(xl: bool, scheduler: str, **given: Any) -> np.ndarray:
    """Latents of diffusers' pipeline after 10 steps."""
    pipeline = case.pipeline(xl)
    pipeline.scheduler = case.scheduler(scheduler)
    made: torch.Tensor = pipeline("A red cat", num_inference_steps=10, output_type="latent",
                                  generator=torch.Generator().manual_seed(3), **given).images
    return made.numpy()


def mine_after(model: StableDiffusion, scheduler: str, **given: Any) -> np.ndarray:
    model.scheduler = read_scheduler(case.saved(case.scheduler(scheduler)))
    params = ImageParams(steps=10, seed=3, **given)
    return model.latents(["A red cat"], params)[0]


@pytest.mark.parametrize("scheduler", case.SCHEDULERS)
def test_latents_of_each_scheduler(models, scheduler):
    given = {"guidance_scale": 5.0, "negative_prompt": "a dog"}
    wanted = theirs_after(False, scheduler, **given)
    assert np.abs(mine_after(models[False], scheduler, **given) - wanted).max() < LATENTS


@pytest.mark.sampled(1)
@pytest.mark.parametrize("negative", [None, "a dog"])
def test_latents_and_images_of_xl(models, negative):
    given = {"guidance_scale": 5.0, "negative_prompt": negative}
    wanted, got = theirs_after(True, "euler", **given), mine_after(models[True], "euler", **given)
    assert np.abs(got - wanted).max() < LATENTS
    scaling = models[True].vae.config.scaling
    with torch.no_grad(): image = case.pipeline(True).vae.decode(torch.tensor(wanted) / scaling).sample
    levels = (case.nhwc(image) / 2 + 0.5).clip(0, 1) * 255
    assert np.abs(models[True].decode(got) - levels).max() < 0.51    # rounded to whole ones


@pytest.mark.slow
def test_eagerly_and_without_guidance():
    wanted = theirs_after(False, "ddim", guidance_scale=1.0)
    eager = StableDiffusion(case.directory(), graphs=False)
    assert np.abs(mine_after(eager, "ddim", guidance_scale=1.0) - wanted).max() < LATENTS


@pytest.mark.slow
def test_each_image_has_its_own_seed(models):
    model = models[False]
    params = ImageParams(steps=2, seed=11, n=2, guidance_scale=5.0)
    made = model.generate(["a cat", "red"], params)
    assert made.images.shape == (4, 16, 16, 3)
    assert made.images.dtype == np.uint8
    assert made.seeds == (11, 12, 13, 14)
    alone = model.generate("red", replace(params, seed=14, n=1))
    assert np.abs(alone.images[0].astype(int) - made.images[3]).max() <= 1      # sums of another order


def test_initial_latents_may_be_given(models):
    model, params = models[False], ImageParams(steps=2, seed=5, guidance_scale=5.0)
    given = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(5)).numpy()
    a, b = model.latents(["red"], params)[0], model.latents(["red"], params, latents=given)[0]
    # by two generators the noise differs in its last bits, which two steps make some hundred times as large;
    # other noise would be as far away as the largest
    assert np.abs(a - b).max() < 2.0**-16 * np.abs(b).max()


def test_tokens_are_those_of_transformers():
    for words, name in ((case.tokenizer(), "tokenizer"), (case.tokenizer("!"), "tokenizer_2")):
        mine = read_tokenizer(case.directory(True) / name, case.LENGTH)
        for text in ("A red  cat and a DOG's 12 cats", "", "é" * 40, "<|endoftext|> cat"):
            wanted = words(text, padding="max_length", max_length=case.LENGTH, truncation=True).input_ids
            ids, dropped = mine.encode(text)
            assert ids == wanted
            assert (dropped > 0) == (len(words(text).input_ids) > case.LENGTH)


def test_tokens_of_vocabulary_and_merges(tmp_path):
    words = case.tokenizer()
    words.save_pretrained(tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    text, whole = "A red  cat and a DOG's 12 cats", read_tokenizer(tmp_path, case.LENGTH)
    (tmp_path / "tokenizer.json").unlink()
    assert read_tokenizer(tmp_path, case.LENGTH).encode(text) == whole.encode(text)


@pytest.mark.slow
def test_weights_of_old_names(tmp_path):
    torch.manual_seed(5)
    folder = case.saved(case.vae())
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    found = {}
    for name, tensor in load_file(folder / "diffusion_pytorch_model.safetensors").items():
        for new, one in old.items(): name = name.replace(f".{new}.", f".{one}.")
        found[name] = tensor
    save_file(found, tmp_path / "diffusion_pytorch_model.safetensors")
    made = [VAE(config.read_vae(folder)) for _ in range(2)]
    for one, place in zip(made, (folder, tmp_path), strict=True): weights.load(one, place)
    latents = Tensor.randn(1, 4, 4, 4)
    assert (made[0].decode(latents) == made[1].decode(latents)).all().item()


openai = lazy("openai")


@pytest.mark.slow
def test_images_are_served():
    command = [sys.executable, "-m", "tinygrad_nv", "serve", str(case.directory()), "--port", "0", "--device",
               "CPU", "--served-model-name", "sd"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        start = ""
        while (found := re.search(r" ready url=(\S+)", start)) is None: start += process.stderr.readline()
        assert "images xl=false size=16x16" in start.lower()
        options = {"seed": 3, "steps": 2, "negative_prompt": "a dog", "scheduler": "euler"}
        with openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none") as client:
            made = client.images.generate(model="sd", prompt="a red cat", n=2, size="16x24",
                                          response_format="b64_json", extra_body=options)
        files = [io.BytesIO(base64.b64decode(each.b64_json or "")) for each in made.data or []]
        got = [np.asarray(Image.open(file)) for file in files]
        params = ImageParams(2, None, "a dog", 24, 16, 3, "euler", 2)
        wanted = StableDiffusion(case.directory()).generate("a red cat", params)
        assert np.abs(np.stack(got).astype(int) - wanted.images).max() <= 1
        for path, body in (("chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
                           ("completions", {"prompt": "hello"}), ("embeddings", {"input": "hello"})):
            answer = httpx.post(f"{found[1]}/v1/{path}", json=body, timeout=60)
            assert (answer.status_code, answer.json()["error"]["reason"]) == (404, "unsupported_task")
        answer = httpx.post(f"{found[1]}/v1/images/generations", json={"prompt": "x", "size": "17x16"})
        assert (answer.status_code, "multiples of 2" in answer.text) == (400, True)
        process.terminate()
        assert process.wait(60) == 0
