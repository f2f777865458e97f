"""Matmuls of rows with a matrix for each group, beside a loop over groups in float64; gradients beside
torch's."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import Policy, grouped_matmul, route

RNG = np.random.default_rng(1)
EXPERTS, K, WIDTH = 7, 24, 10
COUNTS = {"ragged": [3, 0, 5, 1, 0, 2, 4], "one has all": [0, 0, 15, 0, 0, 0, 0],
          "one row": [0, 0, 0, 0, 0, 0, 1], "even": [2] * 7, "some rows have none": [1, 1, 0, 0, 0, 0, 2]}


def given(*shape: int) -> np.ndarray: return RNG.integers(-4, 5, shape).astype(np.float32)


def on_cpu(x: np.ndarray) -> Tensor: return Tensor(np.ascontiguousarray(x), device="CPU")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("biased", [False, True])
def test_rows_in_order(name: str, biased: bool):
    """Integers: the same bits."""
    counts = COUNTS[name]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    rows = sum(counts) + 2 * (name == "some rows have none")
    x, w, bias = given(rows, K), given(EXPERTS, 6, K), given(EXPERTS, 6)
    more = on_cpu(bias) if biased else None
    found = grouped_matmul(on_cpu(x), on_cpu(w), on_cpu(offsets), bias=more).numpy()
    for e, count in enumerate(counts):
        own = slice(offsets[e], offsets[e] + count)
        assert (found[own] == x[own] @ w[e].T + bias[e] * biased).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_clamped"])
def test_a_mixture_of_experts(activation: str, k: int):
    """Both matmuls, gathered, scattered and weighted, within 2e-6 of float64, relative to the largest."""
    tokens = 13
    x, gate_up = RNG.normal(size=(tokens, K)), RNG.normal(size=(EXPERTS, 2 * WIDTH, K))
    down, logits = RNG.normal(size=(EXPERTS, K, WIDTH)), RNG.normal(size=(tokens, EXPERTS))
    x, gate_up, down, logits = (each.astype(np.float32) for each in (x, gate_up, down, logits))
    routing = route(on_cpu(logits), Policy(k, renormalize=True))
    inner = grouped_matmul(on_cpu(x), on_cpu(gate_up), routing.offsets, routing.order, gather=k,
                           activation=activation)
    made = grouped_matmul(inner, on_cpu(down), routing.offsets, routing.order, scatter=True,
                          weights=routing.weights.flatten())
    experts = torch.tensor(routing.experts.numpy()).long()
    weights = torch.tensor(routing.weights.numpy()).double()
    both = torch.einsum("tk,tenk->ten", torch.tensor(x).double(), torch.tensor(gate_up).double()[experts])
    gate, up = both.chunk(2, -1)
    act = {"silu": torch.nn.functional.silu(gate), "gelu": torch.nn.functional.gelu(gate),
           "gelu_tanh": torch.nn.functional.gelu(gate, approximate="tanh"),
           "swiglu_clamped": gate.clamp(max=7) * (1.702 * gate.clamp(max=7)).sigmoid()}[activation]
    up = up.clamp(-7, 7) + 1 if activation == "swiglu_clamped" else up
    wanted = torch.einsum("tei,tehi->teh", act * up, torch.tensor(down).double()[experts])
    wanted = wanted * weights[..., None]
    assert np.abs(made.numpy().reshape(wanted.shape) - wanted.numpy()).max() <= 2e-6 * wanted.abs().max()


def test_gradients_are_those_of_torch():
    """Of x, both matrices and logits, within 2e-6 of the largest."""
    tokens, k = 9, 2
    arrays = [RNG.normal(size=shape).astype(np.float32) for shape in
              ((tokens, K), (EXPERTS, 2 * WIDTH, K), (EXPERTS, K, WIDTH), (tokens, EXPERTS))]
    x, gate_up, down, logits = mine = [on_cpu(each) for each in arrays]
    routing = route(logits, Policy(k, renormalize=True))
    inner = grouped_matmul(x, gate_up, routing.offsets, routing.order, gather=k, activation="silu")
    made = grouped_matmul(inner, down, routing.offsets, routing.order, scatter=True,
                          weights=routing.weights.flatten())
    found = made.reshape(tokens, k, K).sum(1).square().sum().gradient(*mine)
    a, b, c, d = theirs = [torch.tensor(each, requires_grad=True) for each in arrays]
    weights, experts = d.softmax(-1).topk(k, -1)
    gate, up = torch.einsum("tk,tenk->ten", a, b[experts]).chunk(2, -1)
    out = torch.einsum("tei,tehi->teh", torch.nn.functional.silu(gate) * up, c[experts])
    (out * (weights / weights.sum(-1, keepdim=True))[..., None]).sum(1).square().sum().backward()
    for one, other in zip(found, theirs, strict=True):
        assert other.grad is not None
        assert np.abs(one.numpy() - other.grad.numpy()).max() <= 2e-6 * other.grad.abs().max()


def test_what_is_refused():
    x, w, offsets = on_cpu(given(4, K)), on_cpu(given(3, 6, K)), on_cpu(np.array([0, 1, 2, 4], np.int32))
    order = on_cpu(np.arange(4, dtype=np.int32))
    with pytest.raises(SpecError, match="w of f32"): grouped_matmul(x, w[:, :, :8], offsets)
    with pytest.raises(SpecError, match="offsets of s32"): grouped_matmul(x, w, offsets[:3])
    with pytest.raises(SpecError, match="no order"): grouped_matmul(x, w, offsets, scatter=True)
    with pytest.raises(SpecError, match="order of s32"): grouped_matmul(x, w, offsets, order)
    with pytest.raises(SpecError, match="activation='relu'"): grouped_matmul(x, w, offsets, activation="relu")
    with pytest.raises(SpecError, match="weights of shape"):
        grouped_matmul(x, w, offsets, order, weights=Tensor.ones(3), scatter=True)
    with pytest.raises(SpecError, match="floats of one"): grouped_matmul(x.cast(dtypes.int32), w, offsets)
