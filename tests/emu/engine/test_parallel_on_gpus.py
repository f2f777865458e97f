"""A model that two emulated GPUs have, each of a process: their collectives are calls of NCCL in captured
steps."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from tests.support.engine import parallel_on_gpus


@pytest.mark.slow
def test_tokens_are_those_of_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=301, max_position_embeddings=256, initializer_range=0.2, bos_token_id=0, eos_token_id=1)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)

    def tokens(ranks: int) -> object:
        done = subprocess.run([sys.executable, parallel_on_gpus.__file__, str(tmp_path), str(ranks)],
                              capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])
    assert tokens(2) == tokens(1)
