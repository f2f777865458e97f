"""Adapters of the command line: `generate --lora NAME=DIR`, and `serve --lora`."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tinygrad import Tensor

from tinygrad_nv.cli import DEFAULT_MODEL, parse_arguments
from tinygrad_nv.models.config import read_config
from tinygrad_nv.server.adapter_options import lora_modules, lora_options
from tinygrad_nv.train.export import save_adapter


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Of another rank than --max-lora-rank has by default."""
    config, random = read_config(DEFAULT_MODEL), np.random.default_rng(3)
    def drawn(*shape: int) -> Tensor:
        return Tensor(random.normal(size=shape).astype(np.float32), device="CPU")
    matrices = {f"model.layers.{layer}.self_attn.q_proj": (drawn(20, config.hidden_size),
                                                           drawn(config.hidden_size, 20))
                for layer in range(config.num_layers)}
    return save_adapter(tmp_path / "adapter", matrices, 20, 40, target_modules=["q_proj"])


def test_generate(command, adapter: Path):
    words = ("generate", "Once upon a time", "--max-tokens", 8, "--temperature", 0)
    plain, other = command(*words).succeeded(), command(*words, "--lora", f"mine={adapter}").succeeded()
    assert plain.out != other.out
    command(*words, "--lora", adapter).refused("NAME=DIR")
    command(*words, "--lora", "mine=/nowhere").refused("adapter_config.json")


def test_serve(adapter: Path):
    found = parse_arguments(["serve", "--lora", f"mine={adapter}", "other=/there"])
    assert lora_options(found)["enable_lora"]
    assert lora_modules(found, ("base",)) == [("mine", str(adapter)), ("other", "/there")]
