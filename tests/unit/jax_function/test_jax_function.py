"""tinygrad_nv.jax.function: functions of Tensors under jit, grad and vmap, against JAX's own."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tinygrad import Tensor

from tinygrad_nv import jax as tinygrad_nv_jax
from tinygrad_nv.jax import function

X, W = (np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        for seed, shape in enumerate(((3, 4), (4, 5))))


@function
def layer(x: Tensor, w: Tensor, times: int = 2) -> Tensor: return (x @ w).tanh() * times


def reference(x: jax.Array, w: jax.Array, times: int = 2) -> jax.Array: return jnp.tanh(x @ w) * times


def loss(fn: Callable[..., Any]) -> Callable[..., Any]: return lambda x, w: (fn(x, w) ** 2).sum()


def norm_of_gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: (jax.grad(loss(fn))(x, w) ** 2).sum()


QUICK = ("eager", "jit of grad", "vmap of grad")
CASES: dict[str, Callable[..., Any]] = {
    "eager": lambda fn: fn(X, W, times=3),
    "jit": lambda fn: jax.jit(lambda x, w: fn(x * 2, w) + 1)(X, W),
    "grad": lambda fn: jax.grad(loss(fn), (0, 1))(X, W),
    "jit of grad": lambda fn: jax.jit(jax.value_and_grad(loss(fn), (0, 1)))(X, W),
    "grad of grad": lambda fn: jax.grad(norm_of_gradient(fn), (0, 1))(X, W),
    "vmap": lambda fn: jax.vmap(fn, (0, None))(jnp.stack([X, -X]), W),
    "vmap of grad": lambda fn: jax.jit(jax.vmap(jax.grad(loss(fn)), (0, None)))(jnp.stack([X, -X]), W),
    "vmap of vmap": lambda fn: jax.vmap(jax.vmap(fn, (0, None)), (None, 0))(
        jnp.stack([X, -X]), jnp.stack([W, W + 1])),
    "scan": lambda fn: jax.lax.scan(lambda x, _: (fn(x, W)[:, :4], x.sum()), X, length=3)}


@pytest.mark.parametrize("made", [
    pytest.param(made, id=name, marks=() if name in QUICK else pytest.mark.slow)
    for name, made in CASES.items()])
def test_as_jax_computes_it(made: Callable[..., Any]):
    for ours, theirs in zip(*map(jax.tree.leaves, (made(layer), made(reference))), strict=True):
        assert ours.dtype == theirs.dtype
        # sums of up to 5 in another order, four deep: units of float32 at the largest element
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=32 * 2.0**-23 * float(jnp.abs(theirs).max()))


@pytest.mark.parametrize("under", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_bfloat16(under: Callable[..., Any]):
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    made, exact = under(layer)(x, w), reference(x.astype(jnp.float32), w.astype(jnp.float32))
    assert made.dtype == jnp.bfloat16
    # x @ w, tanh and the multiplication are rounded to 8 bits each
    np.testing.assert_allclose(made.astype(jnp.float32), exact, atol=2 * 3 * 2**-8)


def test_trees_and_integers():
    @function
    def pick(state: dict[str, Tensor], scale: float) -> dict[str, Any]:
        return {"rows": state["table"][state["numbers"]] * scale, "next": (state["numbers"] + 1,)}
    table, numbers = jnp.arange(12.0).reshape(4, 3), np.array([3, 0, 3], np.int32)
    made = jax.jit(lambda table: pick({"table": table, "numbers": numbers}, 0.5))(table)
    np.testing.assert_allclose(made["rows"], table[numbers] * 0.5)
    assert made["next"][0].tolist() == [4, 1, 4]
    grads = jax.grad(lambda table: pick({"table": table, "numbers": numbers}, 0.5)["rows"].sum())(table)
    assert grads.sum(1).tolist() == [1.5, 0, 0, 3]


def test_results_of_64_bits_have_jaxs_dtype():
    made = function(lambda x: (x.cast("int64") + 1, x.cast("float64")))(jnp.arange(3))
    assert [each.dtype for each in made] == [jnp.int32, jnp.float32]


def test_examples_one_after_the_other(monkeypatch: pytest.MonkeyPatch):
    def refused(*args: Any, **kwargs: Any) -> Any: raise tinygrad_nv_jax.TransformError("no rule")
    monkeypatch.setattr(tinygrad_nv_jax, "vmap", lambda *args, **kwargs: refused)
    fn = function(lambda x, w: x @ w)
    made = jax.vmap(fn, (0, None))(jnp.stack([X, -X]), W)
    np.testing.assert_allclose(made, jnp.stack([X @ W, -X @ W]), rtol=1e-5, atol=1e-5)


def test_a_step_only_replays_what_was_captured():
    calls = []
    def counted(x: Tensor) -> Tensor:
        calls.append(x.shape)
        return x * 2
    step = jax.jit(function(counted))
    for _ in range(3): step(X).block_until_ready()
    assert calls == [(3, 4)] * 2, "once as it is, once to be captured, both while JAX traces"


def test_constants_that_are_equal_and_differ():
    fn, x = function(lambda x, by: x * by), jnp.ones(2, jnp.int32)
    assert [fn(x, by).dtype for by in (1, 1.0, True)] == [jnp.int32, jnp.float32, jnp.int32]


def test_results_whose_number_depends_on_a_shape():
    fn = function(lambda x: [x[i] for i in range(x.shape[0])])
    assert [len(fn(jnp.ones((n, 2)))) for n in (2, 3, 2)] == [2, 3, 2]
