"""DEV=EMU: the gradients of a mixture of experts' matrices are a kernel each, and near float64's."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from tinygrad import TinyJit

from tests.support.patterns.on_emu import emu
from tinygrad_nv import Tensor, dtypes, explain
from tinygrad_nv.errors import KernelError
from tinygrad_nv.functional import Experts, dispatch, group_rows, grouped_matmul, grouped_outer
from tinygrad_nv.patterns.embedding import mask_unknown_rows

__all__ = ["emu"]
BF16 = dtypes.bfloat16
EXPERTS, TOKENS, HIDDEN, WIDTH = 5, 24, 32, 16
SIGNS = (np.indices((TOKENS, HIDDEN)).sum(0) % 3 - 1).astype(np.float32)


def arrays(seed: int) -> dict[str, np.ndarray]:
    """Of a layer, whole numbers over 8: logits are exact in bfloat16. Nothing is sent to expert 3."""
    random = np.random.default_rng(seed)
    shapes = {"tokens": (TOKENS, HIDDEN), "router": (EXPERTS, HIDDEN),
              "gate_up": (EXPERTS, 2 * WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH),
              "gate_up_bias": (EXPERTS, 2 * WIDTH), "down_bias": (EXPERTS, HIDDEN)}
    made = {name: random.integers(-3, 4, shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    made["tokens"][:, 0], made["router"][3, 0] = 1, -8
    return made


def of_torch(given: dict[str, np.ndarray], dtype: torch.dtype) -> list[np.ndarray]:
    """The gradients in a dtype, expert after expert; weights in float32 at least, as here."""
    mine = {name: torch.tensor(each, dtype=dtype, requires_grad=True) for name, each in given.items()}
    x = mine["tokens"]
    found, chosen = (x @ mine["router"].T).topk(3, -1)
    assert (found[:, 1] > found[:, 2]).all(), "the second expert is one of two"
    weights = found[:, :2].to(torch.promote_types(dtype, torch.float32)).softmax(-1)
    made = torch.zeros(TOKENS, 2, HIDDEN, dtype=dtype)
    for e in range(EXPERTS):
        token, slot = (chosen[:, :2] == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ mine["gate_up"][e].T + mine["gate_up_bias"][e]).chunk(2, -1)
        rows = (torch.nn.functional.silu(gate) * up) @ mine["down"][e].T + mine["down_bias"][e]
        made = made.index_put((token, slot), (rows * weights[token, slot].unsqueeze(-1)).to(dtype))
    (made.sum(1) * torch.tensor(SIGNS, dtype=dtype)).sum().backward()
    return [each.grad.double().numpy() for each in mine.values() if each.grad is not None]


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))])
def test_gradients_of_a_layer_are_as_near_as_torchs(seed: int):
    """Those of gate | up, of down, and of both biases are kernels. In bfloat16, errors are at most twice the
    largest of torch's, and a rounding; those of an expert without rows are zeros."""
    given = arrays(seed)
    exact, usual = of_torch(given, torch.float64), of_torch(given, torch.bfloat16)
    mine = {name: Tensor(each).cast(BF16).realize() for name, each in given.items()}
    experts = Experts(**{name: each for name, each in mine.items() if name != "tokens"})
    made = dispatch(mine["tokens"], experts, "top2").float() * Tensor(SIGNS)
    found = made.sum().gradient(*mine.values())
    names = [each.name for each in explain(*found).kernels]
    assert sum(name.startswith("grouped_outer") for name in names) == 4
    assert sum(name.startswith("grouped_transposed") for name in names) == 2
    Tensor.realize(*found)
    for name, one, other, wanted in zip(given, found, usual, exact, strict=True):
        values = one.float().numpy().astype(np.float64)
        bound = 2 * np.abs(other - wanted).max() + 2.0**-8 * np.abs(wanted)
        assert (np.abs(values - wanted) <= bound).all(), name
        if name.startswith(("gate", "down")): assert (values[3] == 0).all()


@pytest.mark.slow
def test_a_captured_step_follows_the_offsets():
    """No extent depends on them; integers to the bit, groups without rows zeros."""
    random = np.random.default_rng(0)
    y, x = (random.integers(-3, 4, shape).astype(np.float32) for shape in ((24, 16), (12, 24)))
    tensors = [Tensor(each).cast(BF16).realize() for each in (y, x)]

    @TinyJit
    def step(offsets: Tensor, order: Tensor) -> Tensor:
        return grouped_outer(*tensors, offsets, order, gather_x=2).float().realize()
    for counts in ([10, 0, 14], [0, 24, 0], [1, 2, 20], [8, 8, 8]):
        order = random.permutation(24).astype(np.int32)
        offsets = np.cumsum([0, *counts]).astype(np.int32)
        found = step(Tensor(offsets).realize(), Tensor(order).realize()).numpy()
        rows = [slice(*offsets[e:e + 2]) for e in range(3)]
        np.testing.assert_array_equal(found, [y[each].T @ x[order[each] // 2] for each in rows])


def test_float32_is_left_to_the_reference():
    y, x, offsets = Tensor.ones(6, 4), Tensor.ones(6, 8), Tensor([0, 2, 6], dtype="int32")
    made = grouped_outer(*(each.contiguous().realize() for each in (y, x, offsets)))
    report = explain(made)
    assert "operands of float32" in str(report)
    np.testing.assert_array_equal(made.numpy(), np.array([2., 4.])[:, None, None] * np.ones((2, 4, 8)))


def layer(given: dict[str, np.ndarray], partial: bool) -> list[Tensor]:
    """Gradients of tokens, weights and matrices, of the experts 0 to 2 alone, as a rank has them; the
    emulator lets no kernel read a row that no kernel wrote."""
    mine = [Tensor(given[name]).cast(BF16).realize() for name in ("tokens", "gate_up", "down")]
    x, gate_up, down = mine
    weights = Tensor(np.full(2 * TOKENS, 0.5, np.float32)).realize()
    own = np.arange(2 * TOKENS, dtype=np.int32) % EXPERTS
    order, offsets = (each.contiguous() for each in group_rows(Tensor(own).realize(), 3))
    inner = grouped_matmul(x, gate_up[:3].contiguous(), offsets, order, gather=2, activation="silu",
                           partial=partial)
    made = grouped_matmul(inner, down[:3].contiguous(), offsets, order, scatter=True, weights=weights,
                          partial=partial)
    here = Tensor(own).realize() < 3
    out = mask_unknown_rows(made, here).reshape(TOKENS, 2, HIDDEN).sum(1).float() * Tensor(SIGNS)
    return out.sum().gradient(x, weights, gate_up, down)


@pytest.mark.slow
def test_rows_of_no_group_are_not_read():
    given = arrays(7)
    found = [each.float().numpy() for each in layer(given, True)]
    careless = layer(given, False)
    with pytest.raises(KernelError, match="was never written"): careless[0].numpy()
    slots = np.arange(2 * TOKENS) % EXPERTS
    assert (found[1][slots >= 3] == 0).all()
    assert (found[1][slots < 3] != 0).any()
    # a token has gradients of its experts here
    x, gate_up, down = (torch.tensor(given[name], dtype=torch.float64)
                        for name in ("tokens", "gate_up", "down"))
    x.requires_grad_()
    for slot, expert in enumerate(slots):
        if expert >= 3: continue
        gate, up = (x[slot // 2] @ gate_up[expert].T).chunk(2)
        made = (torch.nn.functional.silu(gate) * up) @ down[expert].T * 0.5
        (made * torch.tensor(SIGNS[slot // 2])).sum().backward()
    assert x.grad is not None
    exact = x.grad.numpy()
    assert np.abs(found[0] - exact).max() <= 2.0 ** -6 * np.abs(exact).max()
