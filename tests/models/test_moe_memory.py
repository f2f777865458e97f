"""Memory of a step through a mixture of experts: what the memory plan counts, and how it grows."""
from __future__ import annotations

import gc

import numpy as np
import pytest
from tinygrad import GlobalCounters, Tensor, dtypes
from tinygrad.device import Buffer

from tinygrad_nv.engine.memory_planning import step_bytes
from tinygrad_nv.functional import Policy
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.models.feed_forward import MixtureOfExperts
from tinygrad_nv.models.layer_config import MoEConfig
from tinygrad_nv.models.rope import RopeConfig

HIDDEN, WIDTH, K = 128, 48, 8


def config(experts: int) -> ModelConfig:
    """Like Qwen3-MoE, one layer."""
    moe = MoEConfig(experts, WIDTH, Policy(K, renormalize=True), (True,))
    return ModelConfig("Qwen3MoeForCausalLM", 320, HIDDEN, 3 * HIDDEN, 1, 4, 2, 32, 4096,
                       (RopeConfig("default", 1e6, 32, 4096),), windows=(None,), moe=moe)


def peak_bytes(tokens: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most bytes that are allocated at a time while a layer computes, beside its weights and input."""
    made, random = config(experts), np.random.default_rng(0)
    assert made.moe is not None
    layer = MixtureOfExperts(made, made.moe, dtypes.float32, "CPU")
    def normal(*shape: int) -> Tensor:
        return Tensor(random.standard_normal(shape).astype(np.float32), device="CPU").realize()
    layer.router, layer.gate_up, layer.down = (normal(*each.shape)
                                               for each in (layer.router, layer.gate_up, layer.down))
    x = normal(1, tokens, HIDDEN)
    gc.collect()  # what tests before have left would be freed, and counted, in the middle
    before = most = GlobalCounters.mem_used
    plain = Buffer.allocate
    def allocate(buffer: Buffer, *args: object, **more: object) -> Buffer:
        nonlocal most
        made = plain(buffer, *args, **more)
        most = max(most, GlobalCounters.mem_used)
        return made
    with monkeypatch.context() as patch:
        patch.setattr(Buffer, "allocate", allocate)
        layer(x).realize()
    return most - before


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tokens", [64, 512, pytest.param(2048, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_tokens_times_experts(tokens: int, monkeypatch: pytest.MonkeyPatch):
    """Beside the router's logits."""
    few, many = (peak_bytes(tokens, experts, monkeypatch) for experts in (8, 128))
    rows = tokens * (K * (WIDTH + HIDDEN) + HIDDEN) * 4     # of the tokens' experts, and the sum
    assert rows * 0.9 <= few <= rows * 1.5
    logits = tokens * (128 - 8) * 4
    assert many - few <= 1.25 * logits + 256 * 128
    for experts, found in ((8, few), (128, many)):
        assert found <= step_bytes(config(experts), dtypes.float32, tokens, 1)
