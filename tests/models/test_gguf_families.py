"""GGUF files of every family: hyper-parameters of the directory that was converted, logits of transformers.

llama.cpp's converter is not run here: `gguf_families.py` writes what it writes."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_case import write_model
from test_parity import PROMPT, our_logits, their_logits
from tinygrad_nv.models.config import ModelConfig, read_config

CASES = ("gemma2", "gemma3", "gpt-oss", "phi3", "phi4", "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "olmo2", "olmo3", "smollm3", "granite", "llama4")


def rounded(config: ModelConfig, exact: ModelConfig) -> ModelConfig:
    """With the numbers of `exact` that a file has in float32, where they are those; without what no file
    says."""
    assert np.allclose(config.norm_eps, exact.norm_eps)
    same: dict[str, Any] = {"norm_eps": exact.norm_eps, "dtype": exact.dtype,
                            "eos_token_ids": exact.eos_token_ids}
    return replace(config, **same)


@pytest.mark.parametrize("case", CASES)
def test_floats(hf_model: Callable[[str], Path], tmp_path: Path, case: str):
    """max |logit − HF| ≤ 2e-4 · max |logit|, as of directories."""
    path = tmp_path / "model.gguf"
    write_model(path, hf_model(case))
    found, expected = read_config(path), read_config(hf_model(case))
    print(rounded(found, expected)); print(expected)
    logits = their_logits(hf_model(case), PROMPT[:60])
    error = np.abs(our_logits(path, PROMPT[:60]) - logits).max() / np.abs(logits).max()
    print(case, "error", error)
    assert error <= 2e-4
    assert rounded(found, expected) == expected
