"""Random models of every family, written by transformers' own save_pretrained."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

BASE = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Case:
    """A model: its family, what differs from `BASE`, and how it is saved."""
    family: str
    fields: dict[str, Any] = field(default_factory=dict)
    save: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-sharded": Case("Llama", {"num_key_value_heads": 4}, {"max_shard_size": "100KB"}),
    "llama-biases": Case("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-yarn-mqa": Case("Llama", {"rope_parameters": YARN, "num_key_value_heads": 1}),
    "mistral": Case("Mistral", {"sliding_window": 16, "head_dim": 32}),
    "qwen2": Case("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": Case("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": Case("Qwen3", {"head_dim": 32}),
    "gemma": Case("Gemma", {"head_dim": 32, "num_key_value_heads": 1}),
}


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a case, written on first use."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            case = CASES[name]
            torch.manual_seed(len(name))
            config = getattr(transformers, f"{case.family}Config")(**{**BASE, **case.fields})
            model = getattr(transformers, f"{case.family}ForCausalLM")(config)
            for parameter_name, parameter in model.named_parameters():
                # biases and norms are born 0 and 1, which would hide a bias or a norm that is not applied
                mean = 1.0 if "norm" in parameter_name else 0.0
                if parameter.ndim == 1: torch.nn.init.normal_(parameter, mean, 0.3)
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name], **case.save)
        return made[name]
    return make
