"""Small Stable Diffusion directories of random weights, as diffusers writes them, and its own pipelines."""
from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import pre_tokenizers

from tests.support.lazy import lazy

diffusers, transformers = lazy("diffusers"), lazy("transformers")

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
LENGTH, WIDTH = 16, 32      # tokens of a text, elements of a text encoder
SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}),
    "euler": ("EulerDiscreteScheduler", {"timestep_spacing": "leading", "steps_offset": 1}),
    "dpm++": ("DPMSolverMultistepScheduler", {}),
    "euler-karras": ("EulerDiscreteScheduler", {"use_karras_sigmas": True}),
    "dpm++-karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True})}


def scheduler(name: str) -> Any:
    """Makes a scheduler of diffusers, one of SCHEDULERS."""
    kind, fields = SCHEDULERS[name]
    return getattr(diffusers, kind)(**BETAS, **fields)


def tokenizer(pad: str = "<|endoftext|>") -> transformers.CLIPTokenizer:
    """Of bytes, with a few pairs merged."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("c", "a"), ("ca", "t</w>"), ("a", "n"), ("an", "d</w>"), ("r", "e"), ("re", "d</w>")]
    tokens = [*letters, *(f"{each}</w>" for each in letters), *("".join(pair) for pair in merges)]
    vocabulary = {token: i for i, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=merges, pad_token=pad, model_max_length=LENGTH)


def text_config(words: transformers.CLIPTokenizer, **changed: Any) -> transformers.CLIPTextConfig:
    """Of a small text encoder."""
    fields = {"vocab_size": len(words), "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "max_position_embeddings": LENGTH, "bos_token_id": words.bos_token_id,
              "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id, "projection_dim": 16}
    return transformers.CLIPTextConfig(**fields | changed)


def unet(xl: bool = False, **changed: Any) -> diffusers.UNet2DConditionModel:
    """A small UNet of two sizes."""
    fields: dict[str, Any] = {
        "sample_size": 8, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8,
        "cross_attention_dim": WIDTH, "attention_head_dim": 4,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    if xl: fields |= {
        "attention_head_dim": (2, 4), "use_linear_projection": True, "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 16 + 6 * 8,
        "transformer_layers_per_block": (1, 2), "cross_attention_dim": 2 * WIDTH,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
    return diffusers.UNet2DConditionModel(**fields | changed).eval()


def vae(**changed: Any) -> diffusers.AutoencoderKL:
    """A small autoencoder of two sizes."""
    fields: dict[str, Any] = {
        "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8, "sample_size": 16,
        "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return diffusers.AutoencoderKL(**fields | changed).eval()


@functools.cache
def pipeline(xl: bool = False) -> Any:
    """A pipeline of diffusers with small random networks."""
    torch.manual_seed(7)
    words = tokenizer()
    parts: dict[str, Any] = {
        "unet": unet(xl), "vae": vae(), "scheduler": scheduler("ddim"), "tokenizer": words,
        "text_encoder": transformers.CLIPTextModel(text_config(words)).eval()}
    if not xl:
        made = diffusers.StableDiffusionPipeline(**parts, safety_checker=None, feature_extractor=None,
                                       requires_safety_checker=False)
    else:
        other = tokenizer("!")
        second = text_config(other, hidden_act="gelu", num_hidden_layers=3)
        made = diffusers.StableDiffusionXLPipeline(**parts, tokenizer_2=other, add_watermarker=False,
                                         text_encoder_2=transformers.CLIPTextModelWithProjection(second).eval())
    made.set_progress_bar_config(disable=True)
    return made


@functools.cache
def directory(xl: bool = False) -> Path:
    """The same, saved."""
    folder = Path(tempfile.mkdtemp(prefix="diffusion-"))
    pipeline(xl).save_pretrained(folder)
    return folder


def saved(part: Any) -> Path:
    """A directory of one part."""
    folder = Path(tempfile.mkdtemp(prefix="diffusion-"))
    part.save_pretrained(folder)
    return folder


def nhwc(x: torch.Tensor) -> np.ndarray:
    """Channels last."""
    return np.ascontiguousarray(x.detach().numpy().transpose(0, 2, 3, 1))
