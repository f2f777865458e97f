"""bench/timing/train_gpu_model.py: the launches of many layers from those of few."""
from __future__ import annotations

import pytest

from bench.timing import train_gpu_model
from tinygrad_nv.models.config import parse_config

SMALL = train_gpu_model.GPT2 | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2,
                                "num_key_value_heads": 2, "vocab_size": 512}


@pytest.mark.slow
def test_launches_of_many_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 layers, scheduled as they are, and from 2 and 3: as many of every kernel that has no layers, or
    one layer, among its arguments, and the bytes of all."""
    config = train_gpu_model.shorten(parse_config(SMALL), 6)
    options = {"dtype": "bfloat16", "max_length": 64, "per_device_train_batch_size": 2}
    every = train_gpu_model.launches_of(config, options)
    monkeypatch.setattr(train_gpu_model, "WHOLE", 4)
    few = train_gpu_model.launches_of(config, options)
    assert sum(few.values()) == sum(every.values())
    for call, count in few.items():
        if call.spec is not None: assert every[call] == count, call
    def moved(found: dict[train_gpu_model.Call, int]) -> int:
        return sum(call.nbytes * count for call, count in found.items())
    assert moved(few) == pytest.approx(moved(every), rel=1e-3)
