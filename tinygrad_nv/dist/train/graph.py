"""Values whose gradients a function of the caller's computes.

Protocol. `with_gradient(name, value, inputs, back)` is the value; its gradients with respect to the inputs
are `back(gradient, *inputs)`, a graph of its own: it may compute the value again, and call collectives.
`back` must not hold Tensors of the forward pass, as those would stay in memory until the backward pass.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad import Tensor
from tinygrad.uop.ops import UOp

from tinygrad_nv.patterns.named import call


@dataclass(frozen=True)
class Derived:
    """The identity, with a gradient of its own, by name."""
    name: str


Back = Callable[..., Sequence[Tensor | None]]


def with_gradient(name: str, value: Tensor, inputs: Sequence[Tensor], back: Back) -> Tensor:
    """The value. `back(gradient, *inputs)` gives the gradients of `inputs`, in their order."""
    def backward(grad: UOp, call_: UOp) -> tuple[UOp | None, ...]:
        given = map(Tensor, call_.src[2:])
        return None, *(None if made is None else made.uop for made in back(Tensor(grad), *given))
    return call(Derived(name), _first, value, *inputs, grad=backward)[0]


def _first(what: object, value: Tensor, *_: Tensor) -> tuple[Tensor, ...]: return (value,)
