"""The language model of multimodal directories gives transformers' logits for text."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import ModelError
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.multimodal import ARCHITECTURES

TEXT = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}
TEXTS = {"Gemma3": {"model_type": "gemma3_text"}, "Mistral3": {"model_type": "mistral"},
         "Llama4": {"model_type": "llama4_text", "num_local_experts": 3, "intermediate_size_mlp": 64}}
VISIONS = {"Llama4": {"intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32,
                      "projector_output_dim": 32}}
IDS = [int(i) for i in np.random.default_rng(0).integers(3, 290, 40)]


def written(directory: Path, kind: str) -> np.ndarray:
    """A random model in a directory, and its logits of `IDS`."""
    torch.manual_seed(0)
    text = {**TEXT, **TEXTS[kind]}
    more = {"mm_tokens_per_image": 4} if kind == "Gemma3" else {}
    config_class = getattr(transformers, f"{kind}Config")
    made = config_class(text_config=text, vision_config={**VISION, **VISIONS.get(kind, {})},
                        image_token_index=300, **more)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(made).eval()
    model.save_pretrained(directory)
    # transformers' Llama 4 lacks outputs of images without one
    if kind == "Llama4": model = model.language_model
    with torch.no_grad(): return model(torch.tensor([IDS])).logits.float().numpy()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "renamed"), [("Gemma3", False), ("Gemma3", True), ("Mistral3", False),
                                               ("Mistral3", True), ("Llama4", False)])
def test_logits_of_text(tmp_path: Path, kind: str, renamed: bool):
    """max |logit − theirs| ≤ 2e-4 · max |logit|, by the names of transformers 4 and 5."""
    expected, path = written(tmp_path, kind), tmp_path / "model.safetensors"
    if renamed:
        def new(name: str) -> str:
            name = name.replace("language_model.model.", "model.language_model.")
            return name.replace("language_model.lm_head", "lm_head")
        save_file({new(name): tensor for name, tensor in load_file(path).items()}, path)
    model = Llama(read_config(tmp_path), dtypes.float32, "CPU")
    weights.load(model, tmp_path)
    logits = model(Tensor([IDS], dtype=dtypes.int32, device="CPU")).numpy()
    assert np.abs(logits - expected).max() <= 2e-4 * np.abs(expected).max()


def test_another_language_model_is_refused(tmp_path: Path):
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "opt"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="text_config is of model_type 'opt'"): read_config(tmp_path)


PIXTRAL = {"model_type": "mistral", "hidden_size": 5120, "head_dim": 128, "num_hidden_layers": 40,
           "intermediate_size": 14336, "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None,
           "max_position_embeddings": 1024000, "vocab_size": 131072}
VICUNA = {"model_type": "llama", "vocab_size": 32064, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}


@pytest.mark.parametrize(("kind", "data"), [
    ("llava", {"text_config": VICUNA}), ("llava", {"text_config": PIXTRAL}), ("llava", {}),
    ("llava", {"text_config": {"model_type": "qwen2", "tie_word_embeddings": True, "hidden_size": 2048}}),
    ("llava", {"text_config": {"model_type": "qwen3"}, "tie_word_embeddings": True}),
    ("mistral3", {}), ("mistral3", {"text_config": {**PIXTRAL, "num_attention_heads": 16}}),
    ("gemma3", {"text_config": {"num_hidden_layers": 7}}), ("llama4", {}),
    ("qwen2_5_vl", {"text_config": {"hidden_size": 4096}})], ids=str)
@pytest.mark.parametrize("named", [True, False])
def test_a_part_says_only_what_differs_from_its_class(tmp_path: Path, kind: str, data: dict[str, Any],
                                                      named: bool):
    """The values are transformers'; with architectures and without, which its model_type gives."""
    whole = transformers.CONFIG_MAPPING[kind]
    name = next(each for each in ARCHITECTURES if ARCHITECTURES[each].replace("_text", "") == kind
                or each.startswith(whole.__name__.removesuffix("Config")))
    (tmp_path / "config.json").write_text(json.dumps(
        {**data, "model_type": kind, "architectures": [name] if named else None}))
    given = transformers.AutoConfig.from_pretrained(tmp_path)
    text, made = given.get_text_config(), read_config(tmp_path)
    heads = text.num_attention_heads
    assert (made.vocab_size, made.hidden_size, made.intermediate_size, made.num_layers, made.num_heads,
            made.num_kv_heads, made.max_positions, made.norm_eps) == (
        text.vocab_size, text.hidden_size, text.intermediate_size if kind != "llama4" else
        text.intermediate_size_mlp, text.num_hidden_layers, heads, text.num_key_value_heads,
        text.max_position_embeddings, text.rms_norm_eps)
    assert made.head_dim == (getattr(text, "head_dim", None) or text.hidden_size // heads)
    if kind != "qwen2_5_vl": assert made.tied == given.tie_word_embeddings
    theta = text.rope_parameters
    assert max(each.theta for each in made.distinct_ropes) == theta.get("full_attention", theta)["rope_theta"]
