"""The language model of multimodal directories gives transformers' logits for text."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tinygrad import Tensor, dtypes
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama

from tinygrad_nv.errors import ModelError

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
