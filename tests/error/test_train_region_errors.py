"""Regions: what is refused."""
from __future__ import annotations

import pytest
from tinygrad import Tensor

from tinygrad_nv.errors import ConfigError, SpecError
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.regions import checkpoint


def test_policies():
    words = r"(?s)policy 'all'.*full, selective, dots, offload, none, or a budget"
    with pytest.raises(ConfigError, match=words): checkpoint(lambda x: x, "all")
    with pytest.raises(ConfigError, match=r"(?s)budget 1.5.*a share from 0 to 1"):
        checkpoint(lambda x: x, budget=1.5)
    with pytest.raises(ConfigError, match=r"policy 'half'"):
        TrainingArguments(gradient_checkpointing_policy="half")
    with pytest.raises(ConfigError, match=r"budget -1.0"):
        TrainingArguments(gradient_checkpointing_policy="-1")


def test_results():
    with pytest.raises(SpecError, match=r"a region that returns a tuple"):
        checkpoint(lambda x: (x, x))(Tensor.empty(2))
