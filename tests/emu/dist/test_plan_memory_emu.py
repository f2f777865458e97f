"""DEV=EMU: a plan of one GPU has the bytes that an `LLM` takes."""
from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.patterns.on_emu import emu  # noqa: F401
from tests.support.runtime.failing_memory import holdings
from tinygrad_nv import LLM
from tinygrad_nv.dist.plan.layout import Inference, Layout
from tinygrad_nv.dist.plan.memory import inference
from tinygrad_nv.engine.memory_planning import step_bytes


@pytest.mark.parametrize("sequences", [1, 3])
def test_weights_and_cache_are_what_a_model_holds(make_model, sequences: int):
    directory: Path = make_model(num_hidden_layers=3)
    llm = LLM(directory, device="EMU", max_model_len=96, max_num_seqs=sequences, dtype="float16")
    held = holdings("EMU")
    said = inference(llm.config, Layout(), Inference(sequences, 64, 32, max_tokens=512), 0)
    tables = 1.05       # rotary tables, and allocations rounded up: of so small a model some percent
    assert said["weights"] <= held["weights"][0] <= tables * said["weights"]
    assert held["KV cache"][0] == said["KV cache"]
    assert said["activations"] == step_bytes(llm.config, llm.dtype, 512 + sequences, sequences)
