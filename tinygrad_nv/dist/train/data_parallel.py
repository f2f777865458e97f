"""Data parallel training: every rank has all parameters and its own part of the batch.

Protocol: after `loss.backward()`, `average_gradients(parameters, group)` puts the mean over ranks in place
of each gradient, if the loss is a mean over a rank's batch (`mean=False`: the sum). Gradients of the last
layers are computed first, so buckets go from the last parameter to the first, and the all_reduce of a
bucket depends on its own gradients alone: where a device has streams it runs beside the rest of the backward
pass. The collectives run when the gradients are realized, for instance by the optimiser's step.

Source of buckets: PyTorch Distributed, arXiv 2006.15704, section 3.2.

ZeRO-1 and ZeRO-2: every rank has all parameters, and updates its part of them. `ShardedOptimizer(parameters,
group, make)` cuts parameters, put one behind the other in buckets, into one part a rank. `make` gets this
rank's parts, vectors of float32, and returns an optimiser of tinygrad's over them, so that its states are
parts too. It has to treat elements alike (SGD, Adam, AdamW): norms of whole matrices (LARS, LAMB, Muon) are
not those of parts.

    loss.backward(); optimizer.step()                         ZeRO-1: gradients are whole until the step
    loss.backward(); optimizer.reduce(); … ; optimizer.step() ZeRO-2: a rank keeps its part of gradients alone

`reduce` sums the gradients over ranks, keeps this rank's part and drops the rest. `step` does the same with
gradients that were not reduced yet, updates the parts, gathers them and writes the parameters. Parts are
copies in float32: for parameters of 16 bits the master weights.

Memory a rank, of P parameters of p bytes with gradients of g, and an optimiser of s states: P (p + g) +
4 P (1 + s) / n for ZeRO-1; for ZeRO-2 the gradients between microbatches are 4 P / n.
Source: ZeRO, arXiv 1910.02054, section 5.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.dist.collectives.functions import (
    BUCKET_BYTES,
    all_gather,
    all_reduce_many,
    broadcast,
    buckets,
    reduce_scatter,
)
from tinygrad_nv.dist.group import Group
from tinygrad_nv.errors import DistError


def average_gradients(parameters: Sequence[Tensor], group: Group, *, mean: bool = True,
                      bucket_bytes: int = BUCKET_BYTES, wire: DType | None = None) -> None:
    """Gradients over all ranks in place of this rank's. Raises `DistError` for one that has none."""
    last_first = list(reversed(parameters))
    summed = all_reduce_many(gradients_of(last_first), group, bucket_bytes=bucket_bytes, wire=wire,
                             name="gradients")
    for parameter, grad in zip(last_first, summed, strict=True):
        parameter.grad = grad / group.size if mean else grad


def gradients_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Their gradients. A parameter that a rank did not use has none, and its ranks' collectives would differ:
    raises `DistError`."""
    missing = [i for i, each in enumerate(parameters) if each.grad is None]
    if missing:
        shape = parameters[missing[0]].shape
        raise DistError(f"{len(missing)} of {len(parameters)} parameters have no gradient, the first of "
                        f"shape {shape}", "a gradient of each, on every rank",
                        "call backward() before, and leave out parameters that the loss does not use")
    return [each.grad for each in parameters if each.grad is not None]


def same_parameters(parameters: Sequence[Tensor], group: Group, root: int = 0) -> None:
    """Puts the root's parameters on all ranks: those drawn at random begin alike."""
    for i, each in enumerate(parameters):
        each.assign(broadcast(each.detach(), group, root, name=f"parameter {i}"))
    Tensor.realize(*parameters)


class Optimizer(Protocol):
    """Protocol of an optimiser of tinygrad's."""

    def schedule_step(self) -> list[Tensor]: ...


class Flat:
    """Tensors of one dtype, one behind the other, with zeros at the end that `ranks` parts are equal."""

    def __init__(self, tensors: Sequence[Tensor], ranks: int) -> None:
        self.shapes = [tuple(int(extent) for extent in each.shape) for each in tensors]
        self.count = sum(map(prod, self.shapes))
        self.part = -(-self.count // ranks)
        self.padded = self.part * ranks

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The vector of all of them."""
        flat = Tensor.cat(*(each.reshape(-1) for each in tensors))
        return flat if self.padded == self.count else flat.pad((0, self.padded - self.count))

    def split(self, flat: Tensor) -> list[Tensor]:
        """The tensors that a vector is made of."""
        made, at = [], 0
        for shape in self.shapes:
            made.append(flat[at:at + prod(shape)].reshape(shape))
            at += prod(shape)
        return made

    def own(self, flat: Tensor, rank: int) -> Tensor:
        """The part of a rank."""
        return flat[rank * self.part:(rank + 1) * self.part]


class _Bucket:
    """Parameters whose collectives are one call, and this rank's part of them."""

    def __init__(self, parameters: Sequence[Tensor], group: Group, number: int) -> None:
        self.parameters, self.group, self.name = list(parameters), group, f"bucket {number}"
        self.flat = Flat(parameters, group.size)
        whole = self.flat.join([each.detach() for each in parameters])
        self.shard = self.flat.own(whole, group.rank).cast(dtypes.float32).contiguous().realize()

    def reduce(self, divisor: int, wire: DType | None) -> None:
        """The gradients into that of the part."""
        joined = self.flat.join(gradients_of(self.parameters))
        own = reduce_scatter(joined, self.group, wire=wire, name=f"gradients {self.name}")
        own = own.cast(dtypes.float32) / divisor
        self.shard.grad = own if self.shard.grad is None else self.shard.grad + own
        for each in self.parameters: each.grad = None

    def gather(self) -> None:
        """The parameters from the parts of all ranks."""
        own = self.shard.detach().cast(self.parameters[0].dtype)
        whole = all_gather(own, self.group, name=f"parameters {self.name}")
        for each, new in zip(self.parameters, self.flat.split(whole), strict=True): each.assign(new)


class ShardedOptimizer:
    """ZeRO-1 or ZeRO-2, by whether `reduce` is called after each backward pass."""

    def __init__(self, parameters: Sequence[Tensor], group: Group, make: Callable[[list[Tensor]], Optimizer],
                 *, mean: bool = True, bucket_bytes: int = BUCKET_BYTES, wire: DType | None = None) -> None:
        last_first = list(reversed(parameters))
        self.buckets = [_Bucket([last_first[i] for i in numbers], group, number)
                        for number, numbers in enumerate(buckets(last_first, bucket_bytes))]
        self.divisor, self.wire = group.size if mean else 1, wire
        self.inner = make(self.shards)

    @property
    def shards(self) -> list[Tensor]:
        """Parts of the parameters of this rank, one for each bucket."""
        return [each.shard for each in self.buckets]

    def reduce(self) -> None:
        """Sums gradients over ranks and keeps this rank's part, computed when this returns. Raises
        `DistError` for a parameter without a gradient."""
        self._reduce()
        Tensor.realize(*(each.grad for each in self.shards if each.grad is not None))

    def step(self) -> None:
        """Updates the parameters, and drops the gradients."""
        Tensor.realize(*self.schedule_step())

    def schedule_step(self) -> list[Tensor]:
        """Returns the tensors to realize for a step, as tinygrad's optimisers have it."""
        if any(each.grad is not None for bucket in self.buckets for each in bucket.parameters): self._reduce()
        made = self.inner.schedule_step()
        for each in self.buckets: each.gather()
        for shard in self.shards: shard.grad = None
        return [*made, *(each for bucket in self.buckets for each in bucket.parameters)]

    def _reduce(self) -> None:
        for each in self.buckets: each.reduce(self.divisor, self.wire)
