"""tinygrad's own llm models with experts: the same tokens with kernels of ours as without, and grouped
matmuls in the place of gathers."""
from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, nn
from tinygrad.helpers import Context

from tinygrad_nv import disabled, explain


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """tinygrad.llm.model. The wheel of 0.14 lacks tinygrad/llm/kernels: kernels for AMD GPUs, and Linear."""
    package, kernels = ModuleType("tinygrad.llm.kernels"), ModuleType("tinygrad.llm.kernels.amd")
    package.__path__ = []
    vars(kernels).update(Linear=nn.Linear, amd_custom_kernels_supported=lambda device: False,
                         gated_delta_prefill=None, flash_attention=None)
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.delitem(sys.modules, "tinygrad.llm.model", raising=False)
    from tinygrad.llm import model
    with Context(DEV="CPU"): yield model
    sys.modules.pop("tinygrad.llm.model", None)


def config(llm: Any, gating: int, normalized: bool) -> Any:
    """As of a tiny Qwen3-MoE, or OLMoE without normalized weights."""
    return llm.TransformerConfig(
        num_blocks=1, dim=32, hidden_dim=48, n_heads=4, n_kv_heads=2, norm_eps=1e-5, vocab_size=64,
        head_dim=8, rope_theta=10000.0, rope_dim=8, v_head_dim=8, max_context=48, qk_norm=8, num_experts=6,
        num_experts_per_tok=2, norm_topk_prob=normalized, expert_gating_func=llm.ExpertGating(gating))


def filled(module: Any, seed: int) -> Any:
    """Random weights."""
    random = np.random.default_rng(seed)
    for each in nn.state.get_parameters(module):
        values = random.normal(size=each.shape) / (each.shape[-1]**.5 if each.ndim > 1 else 1)
        each.replace(Tensor(values.astype(np.float32)).realize())
    return module


@pytest.mark.slow
@pytest.mark.parametrize(("gating", "normalized"), [(1, True), (1, False), (2, True)])
def test_a_feed_forward_block(llm: Any, gating: int, normalized: bool):
    """Three grouped matmuls after one sort; within 1e-5 of the largest of tinygrad's."""
    block = filled(llm.FFNBlock(config(llm, gating, normalized)), 0)
    x = Tensor(np.random.default_rng(1).normal(size=(1, 5, 32)).astype(np.float32)).realize()
    names = [each.template for each in explain(block._feed_forward(x)).kernels]
    assert (names.count("grouped_gemm"), names.count("router")) == (3, 1)
    got = block._feed_forward(x).numpy()
    with disabled(): wanted = block._feed_forward(x).numpy()
    assert np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.slow
def test_the_same_tokens(llm: Any):
    """A prompt in two chunks of symbolic lengths, then 6 tokens from captured steps."""
    def generated() -> list[int]:
        tokens = filled(llm.Transformer(config(llm, 1, True)), 2).generate(list(range(1, 12)), chunk_size=8)
        return [next(tokens) for _ in range(6)]
    ours = generated()
    with disabled(): assert ours == generated()
