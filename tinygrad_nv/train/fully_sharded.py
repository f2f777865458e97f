"""ZeRO-3 (FSDP): a rank has a part of every parameter, and all of a layer's only while it computes the layer.

Protocol: as parts.py has it; parts, sums and updates are those of stage 2 (replicas.py), to the bit. The
model's own tensors have no memory. Within `present()` the embedding, the last norm and the head are graphs
that gather them, and each layer is a function that gathers its parameters when the layer before begins, a
layer ahead. It is a region (regions/region.py), whose backward pass reads parameters that are gathered again
when the gradient of the layer behind is there: nothing holds a gathered layer from one pass to the other.
Other values a region keeps by the policy of activation checkpointing, all of them with "none".

`leaves()` are the gathered parameters of the graph that was built last. Their gradients are summed and cut by
`each`, a layer at a time.

Source: ZeRO, arXiv 1910.02054, section 5; PyTorch FSDP, arXiv 2304.11277, sections 3 and 4.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

from tinygrad import Tensor
from tinygrad.helpers import TRAINING
from tinygrad.nn.state import get_parameters

from tinygrad_nv.dist.group import Group
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.train.parts import Named
from tinygrad_nv.train.regions import checkpoint
from tinygrad_nv.train.regions.values import Policy
from tinygrad_nv.train.replicas import Bucket, Sharded

OUTSIDE = -1    # the number of what is no layer


class FullySharded(Sharded):
    """Every rank has its parts alone. `parameters` are the model's, by name; `policy` says what layers keep
    for the backward pass beside them."""
    regions = True

    def __init__(self, model: Llama, parameters: Mapping[str, Tensor], group: Group, policy: Policy) -> None:
        self.model, self.policy = model, policy
        super().__init__(parameters, group, 2)
        self._leaves, self._before = Named(), dict[int, Tensor]()
        self._empty(self.buckets)
        for number, block in enumerate(model.blocks): block.region = self._layer(number, block.compute)

    def _make(self, bucket_bytes: int) -> list[Bucket]:
        """Makes the buckets of each layer, and of what is none, each of one dtype."""
        numbers = {id(tensor): number for number, block in enumerate(self.model.blocks)
                   for tensor in get_parameters(block)}
        def place(name: str) -> tuple[int, str]:
            tensor = self.whole[name]
            return numbers.get(id(tensor), OUTSIDE), tensor.dtype.name
        self._of_layer = dict[int, list[Bucket]]()
        found = list[Bucket]()
        for (number, _), names in groupby(sorted(self.whole, key=place), place):
            own = {name: self.whole[name] for name in names}
            found.append(Bucket(own, self.group, len(found)))
            self._of_layer.setdefault(number, []).append(found[-1])
        return found

    # **** graphs ****

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """The model's graphs gather what they read."""
        self._leaves, self._before = Named(), {}
        own = self._of_layer.get(OUTSIDE, [])
        self._fill(own, [bucket.join(self.optimized) for bucket in own])
        try: yield
        finally: self._empty(own)

    def leaves(self) -> Named:
        """The gathered parameters of the last graph, once: a Tensor that is alive when a step is captured is
        given memory of its own."""
        made, self._leaves, self._before = self._leaves, Named(), {}
        return {name: made[name] for name in self.whole}

    def gather(self) -> list[Tensor]:
        """Nothing: parts are all that a rank has."""
        return []

    def _layer(self, number: int, computed: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A layer that gathers its parameters."""
        own = self._of_layer.get(number, [])

        def call(x: Tensor, *more: Any) -> Tensor:
            x = x.contiguous()
            self._before[number] = x
            rows = [bucket.join(self.optimized, self._before.get(number - 1)) for bucket in own]

            nodes = [row.uop for row in rows]   # no Tensors, which would be alive as long as the graph is

            def again(ready: Tensor) -> list[tuple[Tensor, Tensor]]:
                return [(Tensor(node), bucket.join(self.optimized, ready, " again"))
                        for node, bucket in zip(nodes, own, strict=True)]
            made = self._fill(own, rows)
            try:
                if not TRAINING: return computed(x, *more)
                region = checkpoint(computed, self.policy.name, budget=self.policy.budget,
                                    parameters=made.values(), again=again)
                return region(x, *more)
            finally: self._empty(own)
        return call

    def _fill(self, buckets: list[Bucket], rows: list[Tensor]) -> Named:
        """Puts gathered parameters into the model."""
        made = {name: each.contiguous() for bucket, row in zip(buckets, rows, strict=True)
                for name, each in bucket.wholes(row).items()}
        for name, each in made.items(): self.whole[name].replace(each)
        self._leaves |= made
        return made

    def _empty(self, buckets: list[Bucket]) -> None:
        """Takes the memory of the model's parameters: what is left has their shape and dtype."""
        for bucket in buckets:
            for each in bucket.parameters.values():
                each.replace(Tensor.empty(each.shape, dtype=each.dtype, device=each.device))

    # **** whole ****

    @contextlib.contextmanager
    def save(self, model: Llama) -> Iterator[Llama]:
        """Rank 0's model has whole parameters in memory, which other ranks have a bucket at a time."""
        for bucket in self.buckets:
            made = {name: each.contiguous() for name, each in
                    bucket.wholes(bucket.join(self.optimized)).items()}
            Tensor.realize(*made.values())
            if self.group.rank == 0:
                for name, each in made.items(): bucket.parameters[name].replace(each)
        try: yield model
        finally: self._empty(self.buckets)
