"""A mixture of experts on the emulator: its router and both matmuls are kernels of ours, results are those of
the CPU, and a captured layer serves tokens that other experts get."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tinygrad_nv import Tensor, TinyJit, dtypes, explain
from tinygrad_nv.functional import Policy, route
from tinygrad_nv.models.config import parse_config
from tinygrad_nv.models.feed_forward import MixtureOfExperts
from tinygrad_nv.models.layer_config import MoEConfig

CONFIG = {"architectures": ["MixtralForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1,
          "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 32,
          "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_theta": 10000.0,
          "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False}


def layer(device: str, dtype: object = dtypes.float32) -> MixtureOfExperts:
    """A layer of given weights."""
    config = parse_config(CONFIG)
    assert isinstance(config.moe, MoEConfig)
    made = MixtureOfExperts(config, config.moe, dtype, device)  # type: ignore[arg-type]
    random = np.random.default_rng(3)
    for weight in (made.router, made.gate_up, made.down):
        values = random.normal(0.0, 0.2, weight.shape).astype(np.float32)
        weight.replace(Tensor(values, device="CPU").cast(dtype).to(device).contiguous().realize())
    return made


def tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(1, count, 64)).astype(np.float32)


def on(device: str, values: np.ndarray, dtype: object = dtypes.float32) -> Tensor:
    return Tensor(values, device="CPU").cast(dtype).to(device).contiguous().realize()


@pytest.mark.parametrize("count", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_layer_is_that_of_the_cpu(count: int):
    report = explain(made := layer("EMU")(on("EMU", tokens(count, 1))))
    names = [each.template for each in report.kernels]
    assert (names.count("router"), names.count("grouped_gemm")) == (1, 2)
    wanted = layer("CPU")(on("CPU", tokens(count, 1))).numpy()
    np.testing.assert_allclose(made.numpy(), wanted, atol=4e-6 * np.abs(wanted).max())


@pytest.mark.slow
def test_a_layer_of_bfloat16():
    """Within bfloat16 of the same layer in float32, where both choose the same experts."""
    values = np.array(on("CPU", tokens(7, 2), dtypes.bfloat16).float().numpy())
    rounded = layer("CPU", dtypes.bfloat16)
    exact = layer("CPU")
    for name in ("router", "gate_up", "down"): getattr(exact, name).replace(getattr(rounded, name).float())
    wanted = exact(on("CPU", values)).numpy()
    found = layer("EMU", dtypes.bfloat16)(on("EMU", values, dtypes.bfloat16)).float().numpy()
    # roundings of logits, of the inner rows, of two results and of their sum
    np.testing.assert_allclose(found, wanted, atol=3 * 2.0**-8 * np.abs(wanted).max())


@pytest.mark.slow
def test_a_captured_layer_serves_other_tokens():
    mine, theirs = layer("EMU"), layer("CPU")
    step = TinyJit(lambda x: mine(x).realize())
    chosen = set()
    for seed in range(5):
        values = tokens(4, seed)
        wanted = theirs(on("CPU", values)).numpy()
        found = step(on("EMU", values)).numpy()
        np.testing.assert_allclose(found, wanted, atol=4e-6 * np.abs(wanted).max())
        logits = values[0] @ theirs.router.numpy().T
        chosen.add(tuple(np.bincount(logits.argsort(-1)[:, -2:].flatten(), minlength=8)))
    assert len(chosen) == 5


def test_a_router_of_many_tokens_is_two_kernels():
    logits = np.random.default_rng(0).normal(size=(70, 8)).astype(np.float32)
    policy = Policy(2, renormalize=True)
    found, wanted = (route(on(device, logits), policy) for device in ("EMU", "CPU"))
    names = [each.name for each in explain(found.order).kernels]
    assert [each for each in names if each in ("router", "order")] == ["router", "order"]
    for name in ("experts", "order", "offsets"):
        np.testing.assert_array_equal(getattr(found, name).numpy(), getattr(wanted, name).numpy())
    np.testing.assert_allclose(found.weights.numpy(), wanted.weights.numpy(), rtol=1e-6)


@pytest.mark.slow
def test_a_shared_expert():
    config = parse_config(CONFIG)
    moe = replace(config.moe, shared_width=32, shared_gate=True)
    results = []
    for device in ("EMU", "CPU"):
        made, random = MixtureOfExperts(config, moe, dtypes.float32, device), np.random.default_rng(5)
        weights = (made.router, made.gate_up, made.down, made.shared_gate, made.shared.gate_up.weight,
                   made.shared.down.weight)
        for weight in weights:
            values = random.normal(0.0, 0.2, weight.shape).astype(np.float32)
            weight.replace(on(device, values))
        results.append(made(on(device, tokens(3, 4))).numpy())
    np.testing.assert_allclose(*results, atol=4e-6 * np.abs(results[1]).max())
