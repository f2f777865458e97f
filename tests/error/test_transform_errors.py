"""Transforms, functions for torch and JAX, and DLPack: what they cannot take, and what to do."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes

import tinygrad_nv.jax
import tinygrad_nv.torch
from tinygrad_nv import TinyJit, Variable
from tinygrad_nv.errors import DLPackError, TorchError, TransformError
from tinygrad_nv.transforms import (
    custom_jvp,
    custom_vjp,
    custom_vmap,
    grad,
    jacrev,
    jit,
    jvp,
    scan,
    vjp,
    vmap,
)

X = Tensor([[1.0, 2, 3], [4, 5, 6]])
INTS = Tensor([1, 2])


def total(x: Tensor) -> Tensor: return x.sum()


@custom_vjp
def ruleless(x: Tensor) -> Tensor: return x


@custom_vjp
def short(x: Tensor, y: Tensor) -> Tensor: return x * y


@custom_vjp
def wide(x: Tensor) -> Tensor: return x


@custom_vjp
def alone(x: Tensor) -> Tensor: return x


@custom_vjp
def squared(x: Tensor) -> Tensor: return x


@custom_jvp
def single(x: Tensor) -> Tensor: return x


@custom_vmap
def unsaid(x: Tensor) -> Tensor: return x


@custom_vmap
def narrow(x: Tensor) -> Tensor: return x


@custom_vmap
def twice(x: Tensor) -> Tensor: return x


narrow.defvmap(lambda n, batched, x: x.sum(1))
twice.defvmap(lambda n, batched, x: (x, x))
short.defvjp(lambda x, y: (x * y, None), lambda _, u: (u,))
wide.defvjp(lambda x: (x, None), lambda _, u: (u.sum(),))
alone.defvjp(lambda x: x, lambda _, u: (u,))
squared.defvjp(lambda x: (x, None), lambda _, u: (u * u,))
single.defjvp(lambda p, t: p[0])


CASES: list[tuple[Any, tuple[str, ...]]] = [
    # derivatives
    (lambda: grad(lambda x: x * 2)(X), ("grad of a function that returns dtypes.float (2, 3)",
                                        "one float of shape ()", "sum() or mean() the result, or use vjp")),
    (lambda: grad(lambda x: (x.sum(), x.sum()))(X), ("returns dtypes.float (), dtypes.float ()",)),
    (lambda: grad(lambda x: x.sum().cast(dtypes.int))(X), ("returns dtypes.int ()",)),
    (lambda: grad(lambda x: 3)(X), ("grad of a function that returns 3", "expected: Tensors")),
    (lambda: grad(total)(INTS), ("grad by argument 0, which has a Tensor of dtypes.int", "floats",
                                 "leave the argument out of argnums, or cast it")),
    (lambda: grad(total, 2)(X), ("grad by argument 2 of 1", "the number of an argument")),
    (lambda: grad(total, has_aux=True)(X), ("with has_aux=True of a function that returns Tensor", "a pair")),
    (lambda: grad(lambda x: x.sum() * float(x.max().item()))(X),
     ("a value is read in a function under grad", "a graph that depends on shapes alone", "or use where()")),
    (lambda: vmap(lambda x: x * x.tolist()[0])(X), ("a value is read in a function under vmap",)),
    (lambda: vjp(total, X)[1](X), ("a cotangent of shape (2, 3)", "expected: ()")),
    (lambda: vjp(total, X)[1]([Tensor(1.0)]), ("a cotangent is [Tensor]", "expected: Tensor")),
    (lambda: jvp(total, (X,), (X[0],)), ("a tangent of shape (3,)", "(2, 3)")),
    (lambda: jvp(total, (X,), ()), ("jvp with 1 primals and 0 tangents", "as many")),
    (lambda: jvp(squared, (X,), (X,)), ("a gradient that is not linear", "linear in its cotangent")),
    (lambda: jacrev(total)([X]), ("by argument 0, a list", "a Tensor")),
    (lambda: jacrev(lambda x: [x])(X), ("in a matrix of a list", "a function that returns a Tensor")),
    # derivatives that are given
    (lambda: ruleless(X), ("ruleless without a rule", "a rule before a call: .defvjp(…)")),
    (lambda: short(X, y=X), ("short with y by name", "arguments by position")),
    (lambda: grad(lambda x: short(x, x).sum())(X), ("the rule of short returns 1", "a tuple of 2")),
    (lambda: grad(lambda x: wide(x).sum())(X), ("a gradient of wide of shape ()", "(2, 3), the argument's")),
    (lambda: grad(lambda x: alone(x).sum())(X), ("the forward rule of alone returns a Tensor",
                                                 "a pair: the result, and residuals")),
    (lambda: grad(lambda x: single(x).sum())(X), ("the rule of single returns a Tensor",
                                                  "a pair: the result, and its tangent")),
    # batches
    (lambda: vmap(total, (0, 0))(X), ("in_axes of 2 axes for 1 arguments", "one for each argument")),
    (lambda: vmap(total, None)(X), ("none has an axis of examples", "at least one")),
    (lambda: vmap(total, 2)(X), ("axis 2 of a Tensor of shape (2, 3)", "an axis that it has")),
    (lambda: vmap(lambda x, y: x)(X, X.T),
     ("different sizes: 2 (of a Tensor of shape (2, 3)) and 3 (of a Tensor of shape (3, 2))",
      "one number of examples")),
    (lambda: vmap(total, ({"a": 0},))(X), ("in_axes {'a': 0} for Tensor", "or the same structure")),
    (lambda: vmap(lambda x: x, 0, None)(X), ("out_axes None for a result that depends on the example",)),
    (lambda: vmap(lambda x: Tensor.zeros(3).clone().assign(x))(X),
     ("vmap of a function with an assignment", "a pure function of tinygrad's operations",
      "give what it makes as an argument, or say how it is batched: custom_vmap")),
    (lambda: vmap(unsaid)(X), ("unsaid without a rule", ".defvmap(…)")),
    (lambda: vmap(narrow)(X), ("a batch of narrow of shape (2,)", "expected: (2, 3)")),
    (lambda: vmap(twice)(X), ("the batch of twice is (Tensor, Tensor)", "expected: Tensor")),
    # captures
    (lambda: jit(total)(X, [{1}]), ("jit of total with an argument that has no hash",
                                    "give arrays as Tensors")),
    # loops
    (lambda: scan(lambda c, x: (c, x), X), ("scan without xs and without length", "one of them")),
    (lambda: scan(lambda c, x: (c, x), X, X, 3), ("scan of 2 and 3 steps",
                                                  "one number of steps, at least 1")),
    (lambda: scan(lambda c, x: (c, x), X, length=0), ("scan of 0 steps",)),
    (lambda: scan(lambda c, x: (c, x), X, Tensor(1.0)), ("scan over a Tensor of shape ()", "[length, …]")),
    (lambda: scan(lambda c, x: c, X, X), ("scan of a body that returns Tensor", "a pair: the carry, and y")),
    (lambda: scan(lambda c, x: ([c], x), X, X), ("scan whose carry becomes [Tensor]", "expected: Tensor")),
    (lambda: scan(lambda c, x: (c.sum(), x), X, X), ("scan whose carry of dtypes.float (2, 3) becomes "
                                                     "dtypes.float ()", "the same shape and dtype",
                                                     "cast what the body returns"))]


@pytest.mark.parametrize(("call", "words"), CASES, ids=[words[0] for _, words in CASES])
def test_a_transform_that_cannot_be(call: Any, words: tuple[str, ...]):
    with pytest.raises(TransformError) as error: call()
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


def test_all_is_as_before_after_an_error():
    with pytest.raises(TransformError): grad(lambda x: x.sum() * x.max().item())(X)
    assert grad(total)(X).tolist() == [[1, 1, 1]] * 2
    assert (X + 1).realize().uop.is_realized


@pytest.mark.parametrize(("call", "words"), [
    (lambda: tinygrad_nv.torch.function(Tensor.exp)(torch.empty(3, device="meta")),
     ("a tensor on meta", "a tensor on the CPU", "x.cpu() first")),
    (lambda: tinygrad_nv.torch.function(Tensor.exp)(torch.eye(3).to_sparse()),
     ("a tensor of layout torch.sparse_coo", "a dense one", "x.to_dense()")),
    (lambda: tinygrad_nv.torch.function(Tensor.exp)(torch.ones(3, dtype=torch.complex64)),
     ("a tensor of torch.complex64", "a dtype that both have")),
    (lambda: tinygrad_nv.torch.function(lambda x: 3)(torch.ones(3)),
     ("a function that returns a int", "Tensors, or a tree of them")),
    (lambda: tinygrad_nv.torch.function(lambda x, y: x)(torch.ones(3), np.ones(3)),
     ("has no hash", "give arrays as tensors")),
    (lambda: tinygrad_nv.torch.function(lambda x: x.cast("fp8e4m3"))(torch.ones(3)),
     ("torch has no dtypes.fp8e4m3",)),
    (lambda: tinygrad_nv.torch.backend(None, [], mode="max-autotune"),  # type: ignore[arg-type]
     ("options mode of the backend tinygrad_nv", "none", 'torch.compile(model, backend="tinygrad_nv")')),
    (lambda: tinygrad_nv.jax.function(Tensor.exp)(jnp.ones(3, jnp.complex64)),
     ("an array of complex64", "a dtype that tinygrad has")),
    (lambda: tinygrad_nv.jax.function(lambda x: 3)(jnp.ones(3)),
     ("a function that returns a int", "Tensors, or a tree of them")),
    (lambda: tinygrad_nv.jax.function(lambda x, y: x)(jnp.ones(3), [set()]),
     ("has no hash", "give it as an array")),
    (lambda: tinygrad_nv.jax.function(lambda x: x.cast("fp8e4m3"))(jnp.ones(3)),
     ("a result of dtypes.fp8e4m3", "a dtype that JAX has")),
], ids=["device", "layout", "dtype", "result", "constant", "result dtype", "options", "jax dtype",
        "jax result", "jax constant", "jax result dtype"])
def test_refused_in_words(call: Callable[[], Any], words: tuple[str, ...]):
    with pytest.raises(TorchError) as caught: call()
    for each in words: assert each in str(caught.value)


class Elsewhere:
    """A tensor on a device of DLPack's that tinygrad has not."""
    def __init__(self, kind: int) -> None: self.kind = kind
    def __dlpack__(self, **asked: Any) -> object: return np.ones(3).__dlpack__()
    def __dlpack_device__(self) -> tuple[int, int]: return self.kind, 0


class NoCapsule(Elsewhere):
    def __dlpack__(self, **asked: Any) -> object: return 7


SHARED: dict[str, tuple[Callable[[], Any], str]] = {
    "gradient": (lambda: Tensor(torch.ones(3, requires_grad=True)), r"x\.detach\(\)"),
    "sparse": (lambda: Tensor(torch.ones(3, 3).to_sparse()), "dense tensor"),
    "conjugated": (lambda: Tensor(torch.ones(3, dtype=torch.complex64).conj()), "conj"),
    "complex": (lambda: Tensor(torch.ones(3, dtype=torch.complex64)), "elements of complex, 64 bits"),
    "an AMD GPU": (lambda: Tensor.from_dlpack(Elsewhere(10)), r"kind 10[\s\S]*x\.cpu\(\)"),
    "a GPU that is not there": (lambda: Tensor.from_dlpack(Elsewhere(2)), r"GPU 0[\s\S]*x\.cpu\(\)"),
    "no capsule": (lambda: Tensor.from_dlpack(NoCapsule(1)), "__dlpack__ returned int"),
    "a list": (lambda: Tensor.from_dlpack([1, 2]), r"a list[\s\S]*takes lists"),
    "the emulator": (lambda: torch.from_dlpack(Tensor([1.0], device="EMU")),
                     r"on EMU[\s\S]*tensor\.to\('CPU'\)"),
    "several devices": (lambda: torch.from_dlpack(Tensor([1.0, 2.0]).shard(("CPU", "CPU:1"), 0)),
                        "2 devices"),
    "a symbolic shape": (lambda: np.from_dlpack(Tensor.ones(9).contiguous()[:Variable("n", 1, 9).bind(3)]),
                         "symbolic"),
    "another kind of device": (lambda: Tensor([1.0]).__dlpack__(dl_device=(2, 0)), "DLPack device"),
}


@pytest.mark.parametrize("case", SHARED)
def test_refused(case: str):
    made, words = SHARED[case]
    with pytest.raises(DLPackError, match=words) as caught: made()
    assert isinstance(caught.value, BufferError)
    assert caught.value.expected or caught.value.fix


def test_memory_is_not_shared_from_within_a_capture():
    def step(x: Tensor) -> Tensor: return Tensor(torch.from_dlpack((x + 1).realize()) * 2).realize()
    jitted = TinyJit(step)
    jitted(Tensor([1.0]).realize())
    with pytest.raises(DLPackError, match="TinyJit"): jitted(Tensor([1.0]).realize())
