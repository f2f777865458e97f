"""Gradients of one's own, and which collectives a graph has.

Protocol. `with_gradient(name, value, inputs, back)` is the value, whose gradients of the inputs are
`back(gradient, *inputs)`: for what is computed again in the backward pass, with collectives of its own.
`back` keeps no Tensors: what is alive is kept in memory of its own. `collectives_of(tensors)` lists the
collectives that realizing them runs.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad import Tensor
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.dist.collectives.device import DeviceCollective
from tinygrad_nv.dist.collectives.kernel import Collective
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


def collectives_of(*tensors: Tensor) -> list[Collective]:
    """The collectives that these tensors depend on and that have not run yet, each once."""
    sink = UOp.sink(*(each.uop for each in tensors))
    named = (node.arg.aux for node in sink.toposort(enter_calls=False) if node.op is Ops.FUNCTION)
    return [_on_cpu(each) for each in named if isinstance(each, Collective | DeviceCollective)]


def _on_cpu(what: Collective | DeviceCollective) -> Collective:
    """A collective of a GPU as that of a CPU is written."""
    if isinstance(what, Collective): return what
    order = what.call.order
    return Collective(order.kind, what.shape, what.dtype, 2 * order.count * order.dtype.itemsize, what.name,
                      what.call.group.partition("/")[0])
