"""Scales that are folded into a layer: it computes what it did, and rounds with less error."""
from __future__ import annotations

import numpy as np
import pytest

from tinygrad_nv.quantize.network import DOWN, GATE, LINEARS, UP, Block, K, O, Q, Source, V
from tinygrad_nv.quantize.rounding import round_matrix
from tinygrad_nv.quantize.schemes import Options, Scheme, scheme_of
from tinygrad_nv.quantize.smoothing import Inputs, scale_block

LENGTHS = (40, 24)
AWQ = scheme_of("w4a16", Options(32, symmetric=False, method="awq"))
SMOOTH = scheme_of("w8a8", Options(method="smoothquant", smoothing=0.6))


def exact(values: np.ndarray) -> np.ndarray: return values


def seen(block: Block, x: np.ndarray) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    block(x, LENGTHS, lambda name, inputs: found.update({name: inputs}))
    return found


def inputs_of(block: Block, x: np.ndarray) -> dict[str, Inputs]:
    return {name: Inputs(np.abs(each).mean(0), np.abs(each).max(0), each)
            for name, each in seen(block, x).items()}


@pytest.fixture
def drawn(request: pytest.FixtureRequest, make_model) -> tuple[Block, np.ndarray]:
    """A layer with biases where there may be some, and inputs of which few are large."""
    config = {"num_key_value_heads": 2, "head_dim": 16, **getattr(request, "param", {})}
    source = Source(make_model(config.pop("cls", "LlamaForCausalLM"), **config), 64)
    rng, block = np.random.default_rng(0), source.block(1)
    for linear in block.linears.values():
        if linear.bias is not None: linear.bias[:] = rng.standard_normal(linear.bias.shape)
    for norm in block.norms.values(): norm[:] = rng.uniform(0.5, 2, norm.shape)
    large = np.where(rng.random(64) < 0.1, 20, 1)
    return block, (rng.standard_normal((64, 64)) * large).astype(np.float32)


@pytest.mark.parametrize("scheme", [AWQ, SMOOTH], ids=["awq", "smoothquant"])
@pytest.mark.parametrize("drawn", [
    {}, {"cls": "Qwen2ForCausalLM"}, {"cls": "Qwen3ForCausalLM"}, {"cls": "GemmaForCausalLM"},
    {"num_key_value_heads": 4}, {"attention_bias": True, "mlp_bias": True}],
    ids=["llama", "qwen2", "qwen3", "gemma", "no groups", "biases"], indirect=True)
def test_the_layer_computes_what_it_did(drawn: tuple[Block, np.ndarray], scheme: Scheme):
    block, x = drawn
    change = scale_block(scheme, block, inputs_of(block, x), LINEARS, exact)
    wanted, found = block(x, LENGTHS), change.block(x, LENGTHS)
    np.testing.assert_allclose(found, wanted, atol=2e-5 * float(np.abs(wanted).max()), rtol=0)
    assert {O, DOWN, GATE, Q} <= change.scales.keys() if scheme is AWQ else \
        change.scales.keys() == {Q, K, V, GATE, UP}
    after = seen(change.block, x)
    for name, s in change.scales.items():
        np.testing.assert_allclose(after[name] * s, seen(block, x)[name], rtol=1e-3,
                                   atol=1e-4 * float(np.abs(after[name] * s).max()))


def error(scheme: Scheme, block: Block, x: np.ndarray, name: str) -> float:
    w, inputs = block.linears[name].weight, seen(block, x)[name]
    made = round_matrix(scheme, w, exact).matrix
    return float(np.linalg.norm(inputs @ (made - w).T) / np.linalg.norm(inputs @ w.T))


def test_awq_rounds_with_less_error(drawn: tuple[Block, np.ndarray]):
    block, x = drawn
    change = scale_block(AWQ, block, inputs_of(block, x), LINEARS, exact)
    assert error(AWQ, change.block, x, GATE) < 0.9 * error(AWQ, block, x, GATE)


def test_smoothquant_makes_inputs_alike(drawn: tuple[Block, np.ndarray]):
    block, x = drawn
    change = scale_block(SMOOTH, block, inputs_of(block, x), LINEARS, exact)
    before, after = (np.abs(seen(each, x)[GATE]).max(0) for each in (block, change.block))
    assert after.max() / np.median(after) < 0.6 * before.max() / np.median(before)


def test_norms_are_rounded_and_the_matrices_make_up_for_it(drawn: tuple[Block, np.ndarray]):
    def coarse(values: np.ndarray) -> np.ndarray: return values.astype(np.float16).astype(np.float32)
    block, x = drawn
    change = scale_block(SMOOTH, block, inputs_of(block, x), LINEARS, coarse)
    for norm in change.block.norms.values(): assert np.array_equal(norm, coarse(norm))
    wanted = block(x, LENGTHS)
    np.testing.assert_allclose(change.block(x, LENGTHS), wanted, rtol=0,
                               atol=2e-5 * float(np.abs(wanted).max()))


def test_a_norm_of_an_ignored_layer_stays(drawn: tuple[Block, np.ndarray]):
    block, x = drawn
    chosen = [name for name in LINEARS if name not in (K, UP)]
    change = scale_block(AWQ, block, inputs_of(block, x), chosen, exact)
    assert change.scales.keys() == {O}
    assert all(change.block.norms[name] is each for name, each in block.norms.items())
