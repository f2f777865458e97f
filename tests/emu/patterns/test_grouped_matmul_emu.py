"""DEV=EMU: grouped matmuls are one kernel each, a layer of a mixture of experts, and what matmuls with
gathered matrices become."""
from __future__ import annotations

import numpy as np
from tinygrad import TinyJit
from tinygrad.helpers import Context

from tests.support.patterns.on_emu import emu
from tinygrad_nv import Tensor, dtypes, explain
from tinygrad_nv.functional import grouped_matmul

__all__ = ["emu"]
EXPERTS, K, TOKENS, HIDDEN, WIDTH = 6, 2, 20, 128, 64
BF16 = dtypes.bfloat16


class Layer:
    """Tensors of a layer; whole numbers, or normal ones. No row has expert 3."""

    def __init__(self, integers: bool, seed: int = 0) -> None:
        random = np.random.default_rng(seed)

        def some(*shape: int) -> Tensor:
            made = random.integers(-2, 3, shape) if integers else random.normal(size=shape) / 8
            return Tensor(made.astype(np.float32)).cast(BF16).realize()
        chances = random.random((TOKENS, EXPERTS))
        chances[:, 3] = 2    # the last of each
        self.experts = np.argsort(chances, axis=1)[:, :K].reshape(-1)
        self.offsets = np.concatenate([[0], np.bincount(self.experts, minlength=EXPERTS).cumsum()])
        self.order = np.argsort(self.experts, kind="stable")
        self.routing = [Tensor(each.astype(np.int32)).realize() for each in (self.offsets, self.order)]
        self.x, self.gate_up, self.down = some(TOKENS, HIDDEN), some(EXPERTS, 2 * WIDTH, HIDDEN), \
            some(EXPERTS, HIDDEN, WIDTH)
        self.weights = Tensor(2.0 ** random.integers(-2, 2, TOKENS * K).astype(np.float32)).realize()

    def __call__(self, activation: str = "silu") -> Tensor:
        inner = grouped_matmul(self.x, self.gate_up, *self.routing, gather=K, activation=activation)
        if not activation: return inner
        return grouped_matmul(inner, self.down, *self.routing, scatter=True, weights=self.weights)


def test_integers_are_exact():
    layer = Layer(integers=True)
    found = layer("").float().numpy()
    x, w = layer.x.float().numpy(), layer.gate_up.float().numpy()
    wanted = np.einsum("rnk,rk->rn", w[layer.experts[layer.order]], x[layer.order // K])
    np.testing.assert_array_equal(found, Tensor(wanted).cast(BF16).float().numpy())


def test_a_layer_is_two_kernels_near_float64():
    layer = Layer(integers=False)
    made = layer()
    assert [each.template for each in explain(made).kernels] == ["grouped_gemm"] * 2
    x, gate_up, down = (each.float().numpy().astype(np.float64)
                        for each in (layer.x, layer.gate_up, layer.down))
    both = np.einsum("rnk,rk->rn", gate_up[layer.experts], x[np.arange(TOKENS * K) // K])
    inner = both[:, :WIDTH] / (1 + np.exp(-both[:, :WIDTH])) * both[:, WIDTH:]
    wanted = np.einsum("rhi,ri->rh", down[layer.experts], inner) * layer.weights.numpy()[:, None]
    # a rounding of what lies between, and one of the result
    assert np.abs(made.float().numpy() - wanted).max() <= 2.0**-7 * np.abs(wanted).max()


def test_explain_shows_the_imbalance_of_offsets_that_are_known():
    layer = Layer(integers=True)
    counts = np.diff(layer.offsets)
    most = f"{counts.max()} at most, {counts.max() / (40 / 6):.2f} times the mean of 6.7"
    words = f"rows of a group: {most}, 1 of 6 groups empty"
    assert all(words in each.reason for each in explain(layer()).kernels)
    later = [each.contiguous() for each in layer.routing]
    later[0] = later[0] + 0
    made = grouped_matmul(layer.x, layer.gate_up, *later, gather=K)
    assert all("rows of a group" not in each.reason for each in explain(made).kernels)


def test_a_captured_step_follows_the_offsets():
    """No extent depends on them."""
    first, second = Layer(integers=True), Layer(integers=True, seed=5)
    assert (first.offsets != second.offsets).any()

    @TinyJit
    def step(offsets: Tensor, order: Tensor) -> Tensor:
        return grouped_matmul(first.x, first.gate_up, offsets, order, gather=K).float().realize()
    for layer in (first, second, first, second):
        found = step(*layer.routing).numpy()
        layer.x, layer.gate_up = first.x, first.gate_up
        np.testing.assert_array_equal(found, layer("").float().numpy())


def test_experts_of_tokens():
    random, (experts, n, k) = np.random.default_rng(0), (3, 32, 64)
    with Context(DEV="EMU"):
        x, w = (Tensor(random.integers(-3, 4, shape).astype(np.float32)).cast(dtypes.bfloat16).realize()
                for shape in ((4, 1, k), (experts, n, k)))
        chosen = np.array([[0, 2], [2, -1], [1, 2], [experts, 0]], np.int32)
        sel = Tensor(chosen).realize()
        made = (x.unsqueeze(-2) @ w[sel].transpose(-1, -2)).contiguous()
        assert "grouped_gemm" in [each.template for each in explain(made).kernels], explain(made)
        got, rows, matrices = (each.float().numpy() for each in (made, x, w))
    wanted = np.einsum("tk,tsnk->tsn", rows[:, 0], matrices[np.clip(chosen, -1, experts - 1)])
    wanted[3, 0] = 0
    near = Tensor(wanted, device="CPU").cast(dtypes.bfloat16).float().numpy()
    np.testing.assert_array_equal(got.reshape(wanted.shape), near)
