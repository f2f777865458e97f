"""Parts of parameters that a rank has, and how a step uses them. One rank has all; replicas.py is for
several.

Protocol. Parameters are Tensors by name, `whole` on every rank. A step takes gradients of them and goes
through three places, of which all ranks come to each:

    each(gradients)     after a micro-batch; what is added up, in tensors like `added`
    all(sums)           before the update, where `joins`; what is put into `take(sums)`, which the optimiser
                        takes for its parameters, `optimized`
    gathered()          after the update; what else is to be realized

Within `present()` the model has what its graphs read; a graph that is built there has `leaves()` of
parameters, which its gradients are of. `squares(gradients)` is the sum of squares of those of all ranks, each
once, float64 (1); of several in one graph each has a `name`. `save(model)` gives rank 0 a model with whole
parameters in memory.
"""
from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from tinygrad import Tensor

from tinygrad_nv.models.llama import Llama
from tinygrad_nv.train.optimizers.gradients import square_and_sum

Named = dict[str, Tensor]


class Parts(Protocol):
    """Parts of parameters that a rank has. `sharded`: it updates a part of each. `regions`: the model's
    layers are regions already."""
    whole: Named
    optimized: Named
    added: Named
    sharded: bool
    joins: bool
    regions: bool

    def each(self, gradients: Named) -> Named: ...
    def all(self, sums: Named) -> Named: ...
    def take(self, sums: Named) -> Named: ...
    def gather(self) -> list[Tensor]: ...
    def squares(self, gradients: Named, name: str = "") -> Tensor: ...
    def present(self) -> AbstractContextManager[None]: ...
    def leaves(self) -> Named: ...
    def save(self, model: Llama) -> AbstractContextManager[Llama]: ...


class Whole:
    """One rank, which has and updates all."""
    sharded = joins = regions = False

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.whole = self.optimized = self.added = dict(parameters)

    def each(self, gradients: Named) -> Named:
        """The gradients."""
        return gradients

    def all(self, sums: Named) -> Named:
        """The sums over ranks: this rank's."""
        return sums

    def take(self, sums: Named) -> Named:
        """Sums of all ranks, in place of this rank's."""
        return sums

    def gather(self) -> list[Tensor]:
        """Nothing."""
        return []

    def squares(self, gradients: Named, name: str = "") -> Tensor:
        """The sum of squares of all gradients."""
        return square_and_sum(list(gradients.values()))

    def present(self) -> AbstractContextManager[None]:
        """The model has its parameters anyway."""
        return contextlib.nullcontext()

    def leaves(self) -> Named:
        """The parameters."""
        return self.whole

    def save(self, model: Llama) -> AbstractContextManager[Llama]:
        """The model has its parameters anyway."""
        return contextlib.nullcontext(model)
