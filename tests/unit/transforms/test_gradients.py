"""Derivatives, held to torch.func and to what holds of all of them: linearity, chain rule, transposes."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes

from tests.support.transforms.transform_case import RNG, close
from tinygrad_nv.functional import cross_entropy, embedding, gate_up, scaled_dot_product_attention
from tinygrad_nv.transforms import grad, hessian, jacfwd, jacrev, jvp, value_and_grad, vjp

# float64 against float64: what rounding leaves of sums of some ten products
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def both(*shape: int) -> tuple[Tensor, torch.Tensor]:
    """The same random numbers, float64, for both libraries."""
    x = RNG.standard_normal(shape)
    return Tensor(x), torch.tensor(x)


def softmax(x: Any) -> Any: return x.softmax(-1)


def layer(x: Any) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    return centred / ((centred * centred).mean(-1, keepdim=True) + 1e-3).sqrt()


# what both libraries spell alike, of [4, 6]
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sin": lambda x: x.sin(),
    "exp": lambda x: x.exp(),
    "log": lambda x: (x * x + 1).log(),
    "tanh": lambda x: x.tanh(),
    "sqrt": lambda x: (x * x + 0.5).sqrt(),
    "power": lambda x: (x * x + 0.5) ** 1.7,
    "relu": lambda x: x.relu(),
    "divide": lambda x: 1 / (x * x + 1),
    "sum": lambda x: x.sum(0) * x,
    "mean": lambda x: x.mean(),
    "matmul": lambda x: x @ x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0).reshape(4, 6) * x,
    "flip": lambda x: x.flip(1) * x,
    "softmax": softmax,
    "layer": layer,
    "slices": lambda x: x[1:3, 2:] * x[:2, :4],
    "clip": lambda x: x.clip(-0.5, 0.5),
    "prod": lambda x: x.prod(1),
    "cumsum": lambda x: x.cumsum(1) * x,
    "sigmoid": lambda x: x.sigmoid(),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vjp_and_jvp_are_torchs(name: str):
    fn = FUNCTIONS[name]
    (x, tx), (v, tv) = both(4, 6), both(4, 6)
    want, pull = torch.func.vjp(fn, tx)
    u = RNG.standard_normal(tuple(want.shape))
    out, own = vjp(fn, x)
    close(out, want, **CLOSE)
    close(own(Tensor(u))[0], pull(torch.tensor(u))[0], **CLOSE)
    close(jvp(fn, (x,), (v,))[1], torch.func.jvp(fn, (tx,), (tv,))[1], **CLOSE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["softmax", "layer", "matmul", "power", "prod"])
def test_second_derivatives_are_torchs(name: str):
    fn = FUNCTIONS[name]
    def scalar(x: Any) -> Any: return (fn(x) * fn(x)).sum()
    (x, tx), (v, tv) = both(4, 6), both(4, 6)
    want = torch.func.jvp(torch.func.grad(scalar), (tx,), (tv,))[1].numpy()
    close(jvp(grad(scalar), (x,), (v,))[1], want, **CLOSE)
    # the other order: the gradient of a directional derivative
    close(grad(lambda x: jvp(scalar, (x,), (v,))[1])(x), want, **CLOSE)


def test_jvp_of_vjp_is_the_same_as_the_transpose():
    (x, _), (v, _), (u, _) = both(4, 6), both(4, 6), both(4, 6)
    _, pull = vjp(layer, x)
    pushed = jvp(layer, (x,), (v,))[1]
    close((pushed * u).sum().item(), (v * pull(u)[0]).sum().item(), rtol=1e-10, atol=0)
    # pull is linear: its own derivative is itself
    close(jvp(lambda u: pull(u)[0], (u,), (v,))[1], pull(v)[0], **CLOSE)


def test_hessian_and_jacobians_are_torchs():
    x, tx = both(2, 3)
    def fn(x: Any) -> Any: return (x.exp() * x.sum()).sum()
    close(hessian(fn)(x), torch.func.hessian(fn)(tx), **CLOSE)
    want = torch.func.jacrev(softmax)(tx).numpy()
    for made in (jacrev(softmax)(x), jacfwd(softmax)(x)): close(made, want, **CLOSE)


def test_third_derivative():
    assert grad(grad(grad(lambda x: x ** 4)))(Tensor(2.0)).item() == pytest.approx(48, rel=1e-5)


# **** arguments ****

class Layer(NamedTuple):
    """A weight and a bias."""
    w: Any
    b: Any


@pytest.mark.slow
def test_trees_several_arguments_and_aux():
    (w, tw), (b, tb), (x, tx) = both(3, 2), both(2), both(5, 3)

    def fn(p: Any, x: Any, k: float = 1.0) -> Any:
        y = (x @ p["layer"].w + p["list"][0]).tanh() * k
        return (y * y).sum(), {"y": y, "k": k}
    p, tp = ({"layer": Layer(a, b_), "list": [b_]} for a, b_ in ((w, b), (tw, tb)))
    (value, aux), (gp, gx) = value_and_grad(fn, (0, 1), has_aux=True)(p, x, k=2.0)
    want = torch.func.grad(lambda p, x: fn(p, x, 2.0)[0], (0, 1))(tp, tx)
    assert (sorted(gp), type(gp["layer"])) == (["layer", "list"], Layer)
    for own, other in ((gp["layer"].w, want[0]["layer"].w), (gp["list"][0], want[0]["list"][0])):
        close(own, other, **CLOSE)
    close(gx, want[1], **CLOSE)
    assert gp["layer"].b.numpy().tolist() == [0, 0]     # another leaf, if the same Tensor
    close(aux["y"], fn(tp, tx, 2.0)[1]["y"], **CLOSE)
    assert (aux["k"], value.item()) == (2.0, pytest.approx(fn(tp, tx, 2.0)[0].item()))
    assert grad(fn, has_aux=True)(p, x)[1]["k"] == 1.0
    close(grad(lambda *a: fn(*a)[0], -1)(p, x).numpy() * 4, gx, **CLOSE)


def test_one_tensor_as_two_arguments_is_two():
    x = Tensor([3.0])
    assert grad(lambda a, b: (a * b).sum())(x, x).tolist() == [3.0]
    assert grad(lambda a: (a * x).sum())(x).tolist() == [3.0]      # what is closed over is a constant
    assert [each.tolist() for each in grad(lambda a, b: (a * b * b).sum(), (0, 1))(x, x)] == [[9.0], [18.0]]


def test_numbers_as_tensors_and_other_dtypes():
    assert grad(lambda x: x * x)(Tensor(3.0)).item() == 6
    made = grad(lambda x: (x * x).sum().float())(Tensor([1.5, 2], dtype=dtypes.half))
    assert (made.dtype, made.tolist()) == (dtypes.half, [3.0, 4.0])
    assert jvp(lambda x: (x, Tensor(2.0)), (Tensor(3.0),), (Tensor(1.0),))[1][1].item() == 0


def test_what_does_not_depend_has_no_gradient():
    made = grad(lambda x, y: (y * y).sum(), (0, 1))(Tensor([1.0, 2]), Tensor([3.0]))
    assert (made[0].tolist(), made[1].tolist()) == ([0, 0], [6])
    out, tangent = jvp(lambda x: (x * 0 + 1, Tensor([5])), (Tensor([2.0]),), (Tensor([1.0]),))
    assert (out[1].tolist(), tangent[0].tolist(), tangent[1].tolist()) == ([5], [0], [0])


def test_a_pull_can_be_called_again_and_results_are_clean():
    x = Tensor([1.0, 2]).realize()
    out, pull = vjp(lambda x: {"a": x * x, "b": x.sum()}, x)
    assert pull({"a": Tensor([1.0, 0]), "b": Tensor(1.0)})[0].tolist() == [3, 1]
    assert pull({"a": Tensor([0.0, 1]), "b": Tensor(0.0)})[0].tolist() == [0, 4]
    assert not any(node.op.name == "FUNCTION" for node in out["a"].uop.toposort())


def test_realize_inside_loses_no_gradient():
    x = Tensor([1.0, 2]).realize()

    def fn(x: Tensor) -> Tensor:
        y = (x * 2).realize()
        z = Tensor([5.0]).exp().realize()    # of no input: is realized
        assert z.uop.is_realized
        return (y * x).sum()
    assert grad(fn)(x).tolist() == [4, 8]
    assert (x * 2).realize().uop.is_realized    # afterwards as before


# **** functions of ours ****

def attentions() -> tuple[Any, list[Tensor], Any, list[torch.Tensor]]:
    """A loss over causal attention, with arguments, in both libraries."""
    q, k, v = (Tensor(RNG.standard_normal((2, 4, 16, 32)).astype(np.float32)) for _ in range(3))

    def ours(*given: Tensor) -> Tensor:
        return (scaled_dot_product_attention(*given, is_causal=True) ** 2).sum()

    def theirs(*given: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(16, 16, dtype=torch.bool).tril()
        s = (given[0] @ given[1].transpose(-1, -2) / 32 ** 0.5).masked_fill(~mask, -torch.inf)
        return ((s.softmax(-1) @ given[2]) ** 2).sum()
    return ours, [q, k, v], theirs, [torch.tensor(each.numpy()) for each in (q, k, v)]


@pytest.mark.slow
def test_functions_known_by_name():
    ours, given, theirs, others = attentions()
    want = torch.func.grad(theirs, (0, 1, 2))(*others)
    for own, other in zip(grad(ours, (0, 1, 2))(*given), want, strict=True):
        close(own, other, rtol=2e-4, atol=2e-5)   # float32
    move = torch.func.jvp(theirs, tuple(others), tuple(others[::-1]))[1].item()
    assert jvp(ours, given, given[::-1])[1].item() == pytest.approx(move, rel=1e-4)


@pytest.mark.slow
def test_a_hessian_vector_product_through_attention():
    ours, (q, k, v), theirs, (tq, tk, tv) = attentions()
    # through the backward kernel's reference implementation
    own = jvp(grad(ours), (q, k, v), (k, v, q))[1].numpy()
    other = torch.func.jvp(torch.func.grad(theirs), (tq, tk, tv), (tk, tv, tq))[1].numpy()
    close(own, other, rtol=2e-3, atol=2e-3 * abs(other).max())


def test_losses_and_tables():
    table, hidden = (Tensor(RNG.standard_normal(shape).astype(np.float32)) for shape in ((9, 8), (8, 9)))
    ids = Tensor([[1, 2, 8], [0, 2, 2]])
    tt, th, ti = torch.tensor(table.numpy()), torch.tensor(hidden.numpy()), torch.tensor(ids.numpy()).long()

    def ours(table: Tensor, hidden: Tensor) -> Tensor:
        x = gate_up(embedding(table, ids), "silu")
        return cross_entropy(x.cat(x, dim=-1) @ hidden, ids)

    def theirs(table: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = table[ti].chunk(2, -1)
        x = torch.nn.functional.silu(gate) * up
        return torch.nn.functional.cross_entropy((torch.cat([x, x], -1) @ hidden).flatten(0, 1), ti.flatten())
    want = torch.func.grad(theirs, (0, 1))(tt, th)
    for own, other in zip(grad(ours, (0, 1))(table, hidden), want, strict=True):
        close(own, other, rtol=1e-4, atol=1e-6)
