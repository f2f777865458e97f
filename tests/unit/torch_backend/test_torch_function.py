"""tinygrad_nv.torch.function: functions of Tensors as differentiable functions of torch's tensors."""
from __future__ import annotations

from typing import Any

import torch
from tinygrad import Tensor

import tinygrad_nv.torch
from tinygrad_nv.functional import scaled_dot_product_attention


def layer(x: Tensor, w: Tensor, times: int = 2) -> Tensor: return (x @ w).tanh() * times


def reference(x: torch.Tensor, w: torch.Tensor, times: int = 2) -> torch.Tensor: return (x @ w).tanh() * times


def test_gradients_to_the_second_order_in_float64():
    fn = tinygrad_nv.torch.function(layer)
    x, w = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (3, 2)))
    torch.testing.assert_close(fn(x, w, times=3), reference(x, w, 3))
    assert torch.autograd.gradcheck(fn, (x, w))
    assert torch.autograd.gradgradcheck(fn, (x, w))


def test_captured_once_for_each_set_of_shapes():
    calls = []
    def counted(x: Tensor) -> Tensor:
        calls.append(x.shape)
        return x * 2
    fn = tinygrad_nv.torch.function(counted)
    for n in (3, 3, 4, 3): torch.testing.assert_close(fn(x := torch.randn(n)), x * 2)
    assert calls == [(3,), (4,)]


def test_memory_is_shared():
    fn = tinygrad_nv.torch.function(lambda x, y: x + y)
    x, y = torch.zeros(64), torch.ones(8, 8).t().reshape(64)
    held = fn(x, y)
    x += 3
    assert fn(x, y).tolist() == [4.0] * 64
    assert held.tolist() == [1.0] * 64


def test_trees_and_integers():
    def pick(state: dict[str, Any], scale: float) -> dict[str, Any]:
        return {"rows": state["table"][state["numbers"]] * scale, "next": [state["numbers"] + 1]}
    fn = tinygrad_nv.torch.function(pick)
    table, numbers = torch.randn(5, 3, requires_grad=True), torch.tensor([4, 0, 4])
    made = fn({"table": table, "numbers": numbers}, 0.5)
    torch.testing.assert_close(made["rows"], table[numbers] * 0.5)
    assert made["next"][0].tolist() == [5, 1, 5]
    assert not made["next"][0].requires_grad
    made["rows"].sum().backward()
    assert table.grad.sum(1).tolist() == [1.5, 0, 0, 0, 3]


def test_a_result_that_depends_on_no_argument_has_no_gradient():
    fn = tinygrad_nv.torch.function(lambda x, y: (x * 2, Tensor.arange(3).float()))
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    made, constant = fn(x, y)
    assert constant.tolist() == [0, 1, 2]
    (made.sum() + constant.sum()).backward()
    assert x.grad.tolist() == [2, 2, 2]
    assert y.grad.tolist() == [0, 0, 0]


def test_attention_in_a_model_of_torch():
    fn = tinygrad_nv.torch.function(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True))
    ours = [torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3)]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    weight = torch.randn(1, 2, 6, 8)
    (fn(*ours) * weight).sum().backward()
    (torch.nn.functional.scaled_dot_product_attention(*theirs, is_causal=True) * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5)


def test_inside_of_torch_compile():
    fn = tinygrad_nv.torch.function(layer)
    x, w = torch.randn(2, 3), torch.randn(3, 2)
    made = torch.compile(lambda x, w: fn(x * 2, w) + 1, backend="tinygrad_nv")(x, w)
    torch.testing.assert_close(made, reference(x * 2, w) + 1)


def test_tensors_of_one_layout_with_and_without_a_copy():
    """What was captured with a copy, since it did not begin where vectors may, is replayed without one."""
    fn, pairs = tinygrad_nv.torch.function(lambda x: x * 2), torch.randn(4, 6, 2)
    for i in (1, 0, 1): torch.testing.assert_close(fn(pairs[..., i]), pairs[..., i] * 2)


def test_constants_that_are_equal_and_differ():
    fn, x = tinygrad_nv.torch.function(lambda x, by: x * by), torch.ones(2, dtype=torch.int32)
    assert [fn(x, by).dtype for by in (1, 1.0, True)] == [torch.int32, torch.float32, torch.int32]


def test_results_without_a_dtype_of_their_own():
    """A bool and a number of Python make an integer of no width."""
    made = tinygrad_nv.torch.function(lambda x: (x + 1, x * 0.5))(torch.tensor([True, False]))
    assert [each.dtype for each in made] == [torch.int32, torch.float32]
    assert tinygrad_nv.torch.function(lambda x: x + 1)(torch.ones(2, dtype=torch.uint16)).tolist() == [2, 2]


def test_results_whose_number_depends_on_a_shape():
    fn = tinygrad_nv.torch.function(lambda x: [x[i] for i in range(x.shape[0])])
    assert [len(fn(torch.ones(n, 2))) for n in (2, 3, 2)] == [2, 3, 2]


def test_transforms_of_torch():
    def theirs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor: return torch.tanh(x @ w)
    fn = tinygrad_nv.torch.function(lambda x, w: {"made": (x @ w).tanh()})
    def ours(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor: return fn(x, w)["made"]
    x, w = torch.randn(5, 2, 3), torch.randn(3, 4)
    made = [(torch.vmap(each, (0, None))(x, w),
             torch.func.grad(lambda w, each=each: each(x[0], w).sum())(w),
             torch.vmap(torch.func.grad(lambda x, each=each: each(x, w).sum()))(x))
            for each in (ours, theirs)]
    for a, b in zip(*made, strict=True): torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
