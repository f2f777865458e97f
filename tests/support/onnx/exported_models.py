"""Transformers of random weights as torch's exporter writes them, with inputs, and what torch computes."""
from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers as hf
from transformers.models.whisper.modeling_whisper import WhisperEncoder

VOCAB, LENGTH = 100, 72     # longer than a block of keys
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "intermediate_size": 128}


@dataclass(frozen=True)
class Exported:
    """A model file, its inputs by name, and the output that torch computes."""
    model: bytes
    inputs: dict[str, np.ndarray]
    wanted: np.ndarray


def _bert() -> torch.nn.Module:
    return hf.BertModel(hf.BertConfig(vocab_size=VOCAB, max_position_embeddings=128, **SIZES))


def _gpt2() -> torch.nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=128,
                                            bos_token_id=0, eos_token_id=1))


def _llama() -> torch.nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2,
                                              max_position_embeddings=128, **SIZES))


def _vit() -> torch.nn.Module: return hf.ViTModel(hf.ViTConfig(image_size=32, patch_size=4, **SIZES))


def _whisper() -> torch.nn.Module:
    return WhisperEncoder(hf.WhisperConfig(d_model=64, encoder_layers=2, encoder_attention_heads=4,
                                           encoder_ffn_dim=128, max_source_positions=80, num_mel_bins=80))


def _tokens() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, -5:] = 0    # padding
    return {"input_ids": torch.randint(0, VOCAB, (2, LENGTH)), "attention_mask": mask}


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "bert": (_bert, _tokens), "gpt2": (_gpt2, _tokens), "llama": (_llama, _tokens),
    "vit": (_vit, lambda: {"pixel_values": torch.randn(2, 3, 32, 32)}),
    "whisper": (_whisper, lambda: {"input_features": torch.randn(1, 80, 160)})}


class _First(torch.nn.Module):
    """The first output of a model, its inputs by position."""

    def __init__(self, model: torch.nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = dict(zip(self.names, inputs, strict=True))
        if "attention_mask" in given and hasattr(self.model, "lm_head"): given["use_cache"] = False
        made: torch.Tensor = self.model(**given)[0]
        return made


@cache
def exported(name: str) -> Exported:
    """A model, exported by TorchScript with free batch and sequence."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    given = inputs()
    model, file = _First(make(), list(given)).eval(), io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        wanted = model(*given.values()).numpy()
        torch.onnx.export(model, tuple(given.values()), file, input_names=list(given),
                          output_names=["output"], opset_version=18, dynamo=False,
                          dynamic_axes={each: {0: "batch"} for each in given})
    return Exported(file.getvalue(), {each: x.numpy() for each, x in given.items()}, wanted)
