"""Models of transformers with random weights, small, and how far a compiled one is from float64.

A result is held to c times the error of torch's own float32, both against the same model in float64, plus one
unit of float32 at the result's largest element: sums are in another order, so neither is the better one.
"""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTModel,
)

TIMES = 4
EPSILON = 2.0**-23
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
                         "num_attention_heads": 4}
NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0}


def llama(**more: Any) -> Any:
    fields = {"vocab_size": 61, "num_key_value_heads": 2, "max_position_embeddings": 64, **SMALL, **more}
    return LlamaForCausalLM(LlamaConfig(**fields))


def bert() -> Any:
    return BertModel(BertConfig(vocab_size=61, max_position_embeddings=64, **SMALL), add_pooling_layer=False)


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=4, n_positions=64,
                                      bos_token_id=0, eos_token_id=0, **NO_DROPOUT))


def vit() -> Any: return ViTModel(ViTConfig(image_size=16, patch_size=4, **SMALL), add_pooling_layer=False)


def inputs(name: str) -> dict[str, Any]:
    """What a model is called with: BERT's second sequence is padded."""
    tokens = torch.randint(61, (2, 7))
    if name == "vit": return {"pixel_values": torch.randn(2, 3, 16, 16)}
    if name != "bert": return {"input_ids": tokens, "use_cache": False}
    return {"input_ids": tokens, "attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3])}


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "bert": bert, "gpt2": gpt2, "vit": vit}


def made(name: str) -> Any:
    """A model with the same random weights each time."""
    torch.manual_seed(3)
    return MODELS[name]().eval()


def double(value: Any) -> Any:
    """A copy in float64, of a module or tensor of floats; anything else as it is."""
    if isinstance(value, torch.nn.Module): return copy.deepcopy(value).double()
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def gradients(called: Any, model: Any, given: dict[str, Any],
              weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of a weighted sum of a model's results, by parameter."""
    model.zero_grad()
    (called(**given)[0] * weight).sum().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def close(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """Ours is as near to float64 as the head of this file says."""
    mistake, allowed = (float((each.double() - exact).abs().max()) for each in (ours, theirs))
    assert mistake <= TIMES * allowed + EPSILON * float(exact.abs().max()), (mistake, allowed)
