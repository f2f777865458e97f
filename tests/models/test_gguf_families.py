"""GGUF files of every family: hyper-parameters of the directory that was converted, logits of transformers.

llama.cpp's converter is not run here: `gguf_families.py` writes what it writes."""
from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import CASES, LATENT, LLAMA3, YARN, Case, saved
from gguf_case import write_model
from test_parity import PROMPT, our_logits, their_logits
from tinygrad_nv.models.config import ModelConfig, read_config
from tinygrad_nv.models.rope import attention_factor, inverse_frequencies


def changed(name: str, **more: Any) -> Case:
    """A case with other fields; None leaves one out."""
    made = {**CASES[name].fields, **more}
    return replace(CASES[name], fields={key: value for key, value in made.items() if value is not None})


# what a file cannot say is as in published models
FAMILIES = {
    "gemma2": changed("gemma2", query_pre_attn_scalar=24),
    "gemma3": changed("gemma3", query_pre_attn_scalar=16, num_hidden_layers=7, layer_types=None),
    "gpt-oss": CASES["gpt-oss"],
    "phi3": CASES["phi3"],
    "phi4": changed("phi4", original_max_position_embeddings=48),
    "deepseek-v2": CASES["deepseek-v2"],
    "deepseek-v2-lite": changed("deepseek-v2-lite", mlp_bias=None, rope_parameters={
        **YARN, "mscale": 0.707, "mscale_all_dim": 0.707}),
    "deepseek-v3": CASES["deepseek-v3"],
    "olmo2": CASES["olmo2"],
    "olmo3": CASES["olmo3"],
    "smollm3": CASES["smollm3"],
    "granite": CASES["granite"],
    "llama4": changed("llama4", num_hidden_layers=4, moe_layers=None, interleave_moe_layer_step=2,
                      attention_chunk_size=None, no_rope_layer_interval=None, floor_scale=None)}


def require_alike(found: Any, expected: Any, name: str = "config") -> None:
    """Equal, numbers to the seven digits that a file has of them."""
    if is_dataclass(expected):
        assert type(found) is type(expected), name
        for each in fields(expected):
            if each.compare: require_alike(getattr(found, each.name), getattr(expected, each.name), each.name)
    elif isinstance(expected, tuple) and not isinstance(expected, str):
        assert len(found) == len(expected), name
        for one, other in zip(found, expected, strict=True): require_alike(one, other, name)
    elif isinstance(expected, float): assert found == pytest.approx(expected, rel=1e-6), name
    else: assert found == expected, name


def comparable(found: ModelConfig, expected: ModelConfig) -> ModelConfig:
    """Without what no file says; with the rope of `expected` where a file has it in other words."""
    rope, other = found.distinct_ropes[0], expected.distinct_ropes[0]
    if other.kind in ("llama3", "longrope"):
        assert np.allclose(*(inverse_frequencies(each, 256) for each in (rope, other)), rtol=1e-6, atol=0)
        assert attention_factor(rope) == pytest.approx(attention_factor(other), rel=1e-6)
        found = replace(found, ropes=tuple(each and other for each in found.ropes))
    return replace(found, dtype=expected.dtype, eos_token_ids=expected.eos_token_ids,
                   draft_layers=expected.draft_layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_floats(tmp_path: Path, family: str):
    """max |logit − HF| ≤ 2e-4 · max |logit|, as of directories."""
    directory, path = saved(FAMILIES[family], tmp_path / "source", len(family)), tmp_path / "model.gguf"
    write_model(path, directory)
    found, expected = read_config(path), read_config(directory)
    require_alike(comparable(found, expected), expected)
    logits = their_logits(directory, PROMPT[:60])
    error = np.abs(our_logits(path, PROMPT[:60]) - logits).max() / np.abs(logits).max()
    print(f"ERROR {family} {error:.1e}")
    assert error <= 2e-4
