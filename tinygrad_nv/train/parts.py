"""What a rank has of parameters, and how a step uses it. One rank has all; replicas.py is for several.

Protocol. Parameters are Tensors by name, `whole` on every rank. A step takes gradients of them and goes
through three places, of which all ranks come to each:

    each(gradients)     after a micro-batch; what is added up, in tensors like `added`
    all(sums)           before the update, where `joins`; what is put into `taken(sums)`, which the optimiser
                        takes for its parameters, `optimized`
    gathered()          after the update; what else is to be realized
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tinygrad import Tensor

Named = dict[str, Tensor]


class Parts(Protocol):
    """What a rank has of parameters. `sharded`: it updates a part of each."""
    whole: Named
    optimized: Named
    added: Named
    sharded: bool
    joins: bool

    def each(self, gradients: Named) -> Named: ...
    def all(self, sums: Named) -> Named: ...
    def taken(self, sums: Named) -> Named: ...
    def gathered(self) -> list[Tensor]: ...
    def squares(self, own: Tensor) -> Tensor: ...


class Whole:
    """One rank, which has and updates all."""
    sharded = joins = False

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.whole = self.optimized = self.added = dict(parameters)

    def each(self, gradients: Named) -> Named:
        """The gradients."""
        return gradients

    def all(self, sums: Named) -> Named:
        """The sums over ranks: this rank's."""
        return sums

    def taken(self, sums: Named) -> Named:
        """Sums of all ranks, in place of this rank's."""
        return sums

    def gathered(self) -> list[Tensor]:
        """Nothing."""
        return []

    def squares(self, own: Tensor) -> Tensor:
        """The sum of squares of all gradients."""
        return own
