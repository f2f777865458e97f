"""ZeRO-3 (FSDP): each rank keeps a part of every layer's parameters, and all of one only to compute it.

Protocol. `FullySharded(layers, group)` takes layers, callables that own their parameters as attributes, and
cuts each layer's into one vector a rank (`shards`), float32 by default. The layers' own tensors are empty
from then on. `model(x, *more)` calls the layers one after the other on x; `more` goes to each as it is, and
has no gradient. `loss.backward()` gives the shards their gradients, summed over ranks (divide the loss for
a mean). Any optimiser of tinygrad's that treats elements alike updates `model.shards`.

A layer's parameters are gathered when the layer before begins (a layer ahead), and nothing needs them after
it (resharded behind). Its backward pass gathers them again, a layer ahead in the other direction, and
computes the layer again from its input: of the activations the inputs of layers stay, as with activation
checkpointing of whole layers. So a layer has to compute the same twice: no dropout.

Memory a rank, of layers of P_k parameters: 4 (2 + s) Σ P_k / n of shards, their gradients and an
optimiser's s states, and around a layer up to two gathered layers, or one and the gradients of one.

Source: ZeRO, arXiv 1910.02054; PyTorch FSDP, arXiv 2304.11277, sections 3 and 4.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.nn.state import get_parameters
from tinygrad.uop.ops import UOp

from tinygrad_nv.dist.collectives.functions import all_gather, reduce_scatter
from tinygrad_nv.dist.group import Group
from tinygrad_nv.dist.train.data_parallel import Flat
from tinygrad_nv.dist.train.graph import with_gradient
from tinygrad_nv.errors import DistError

Layer = Callable[..., Tensor]


class FullySharded:
    """Layers, one after the other, whose parameters are cut over a group."""

    def __init__(self, layers: Sequence[Layer], group: Group, dtype: DType = dtypes.float32) -> None:
        self.layers = [_Layer(layer, group, dtype, f"layer {i}") for i, layer in enumerate(layers)]

    @property
    def shards(self) -> list[Tensor]:
        """Parts of the parameters of this rank, one vector a layer."""
        return [each.shard for each in self.layers]

    def __call__(self, x: Tensor, *more: Tensor) -> Tensor:
        before: UOp | None = None
        passed = _Passed([], [])
        for layer in self.layers:
            x = x.contiguous()
            x, before = layer(x, more, before, passed), x.uop
        return x

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """All layers have their parameters within: to save or to look at them. All ranks call it."""
        full = [each.gather() for each in self.layers]
        Tensor.realize(*full)
        with contextlib.ExitStack() as stack:
            for each, flat in zip(self.layers, full, strict=True): stack.enter_context(each.fill(flat))
            yield


@dataclass
class _Passed:
    """A backward pass: the gradients that came to the layers behind, and what they reduced."""
    gradients: list[UOp]
    reduced: list[UOp]

    def first(self, grad: Tensor) -> UOp:
        """Returns what is computed when the next layer's parameters are gathered, which is when the layer
        behind has its gradient and the one behind that is done."""
        if not self.gradients: return grad.uop
        return self.reduced[-2] if len(self.reduced) > 1 else self.gradients[-1]


class _Layer:
    """A layer, and this rank's part of its parameters."""

    def __init__(self, layer: Layer, group: Group, dtype: DType, name: str) -> None:
        self.layer, self.group, self.name = layer, group, name
        self.parameters = get_parameters(layer)
        found = {each.dtype for each in self.parameters}
        if len(found) != 1:
            raise DistError(f"{name} has parameters of {sorted(each.name for each in found) or 'no dtype'}",
                            "parameters, all of one dtype", "cast them, or make them a layer of their own")
        self.dtype = found.pop()
        self.flat = Flat(self.parameters, group.size)
        whole = self.flat.join([each.detach() for each in self.parameters])
        self.shard = self.flat.own(whole, group.rank).cast(dtype).contiguous().realize()
        for each in self.parameters: _empty(each)

    def gather(self, first: UOp | None = None, name: str = "") -> Tensor:
        """The vector of all parameters, gathered after `first` is computed."""
        own = self.shard if self.shard.dtype == self.dtype else self.shard.cast(self.dtype).contiguous()
        return all_gather(own, self.group, name=f"{self.name}{name}",
                          after=None if first is None else Tensor(first))

    @contextlib.contextmanager
    def fill(self, flat: Tensor) -> Iterator[list[Tensor]]:
        """The layer has its parameters within."""
        made = self.flat.split(flat)
        try:
            for each, new in zip(self.parameters, made, strict=True): each.replace(new)
            yield made
        finally:
            for each in self.parameters: _empty(each)

    def __call__(self, x: Tensor, more: Sequence[Tensor], before: UOp | None, passed: _Passed) -> Tensor:
        """Runs the layer on x. `before` is computed when its parameters are gathered; `passed` is what the
        layers behind have done."""
        with self.fill(self.gather(before)): y = self.layer(x, *more)

        def back(grad: Tensor, x: Tensor, _: Tensor, *more: Tensor) -> list[Tensor | None]:
            grad, given = grad.contiguous(), x.detach()
            full = self.gather(passed.first(grad), " again")
            with self.fill(full): again = self.layer(given, *more)
            dx, whole = again.gradient(given, full, gradient=grad)
            own = reduce_scatter(whole, self.group, name=f"gradients {self.name}")
            passed.gradients.append(grad.uop)
            passed.reduced.append(own.uop)
            return [dx, own.cast(self.shard.dtype), *(None for _ in more)]
        return with_gradient(self.name, y, [x, self.shard, *more], back)


def _empty(parameter: Tensor) -> None:
    """Takes its memory: what is left has its shape and dtype."""
    parameter.replace(Tensor.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device))
