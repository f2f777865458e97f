"""The families under test: what differs from `BASE`, and how it is saved."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
