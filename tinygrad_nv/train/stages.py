"""A stage of a pipeline as a rank has it, and the whole model that stages come to.

Protocol: `stage_model(config, dtype, device, pipe)` is the network of this rank's stage (models/parallel.py);
its parameters have the names that they have in the whole network. `Staged` are the parts of a rank (parts.py)
of a stage: those of `inner`, which adds up over the ranks that have the same stage, and what stages share.

Squares of gradients are added up over stages. A tied embedding is on the first stage, as embedding, and on
the last, as head: the gradients of both are added up before the update, so that both update it alike, and the
squares of the last are left out of the norm.

Within `saved()` rank 0 has the whole model, of which each stage sends its part.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

from tinygrad import Tensor
from tinygrad.dtype import DType

from tinygrad_nv.dist.collectives.functions import all_reduce, extents, recv, send
from tinygrad_nv.dist.group import Group
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.parallel import Parallel, stage_config, stage_layers
from tinygrad_nv.models.shares import LAYER
from tinygrad_nv.models.weights import EMBEDDING
from tinygrad_nv.train.network import named
from tinygrad_nv.train.parts import Named, Parts
from tinygrad_nv.train.replicas import one_rank


def stage_model(config: ModelConfig, dtype: DType, device: str | None, pipe: Group) -> Llama:
    """The network of this rank's stage, without weights. Raises `ModelError` for more stages than layers."""
    parallel = Parallel(one_rank(), config, pipe)
    return Llama(stage_config(config, pipe.rank, pipe.size), dtype, device, parallel=parallel)


class Staged:
    """The parts of a rank's stage. `ends`: the first and the last stage's ranks of a tied embedding, on these
    two; None where there is none."""

    def __init__(self, model: Llama, inner: Parts, pipe: Group, ends: Group | None) -> None:
        self.model, self.inner, self.pipe, self.ends = model, inner, pipe, ends
        self.whole, self.optimized, self.added = inner.whole, inner.optimized, inner.added
        self.sharded, self.regions = inner.sharded, inner.regions
        self.joins = inner.joins or ends is not None

    @property
    def elsewhere(self) -> frozenset[str]:
        """Parameters that another stage has, too, and counts."""
        return frozenset({EMBEDDING} & self.whole.keys() if self.pipe.rank else ())

    def each(self, gradients: Named) -> Named:
        """What is added up of a micro-batch's gradients."""
        return self.inner.each(gradients)

    def all(self, sums: Named) -> Named:
        """What the optimiser takes of sums, as far as it is another."""
        made = self.inner.all(sums) if self.inner.joins else {}
        if self.ends is not None:
            own = made.get(EMBEDDING, sums[EMBEDDING])
            made[EMBEDDING] = all_reduce(own, self.ends, name="gradient of the tied embedding")
        return made

    def taken(self, sums: Named) -> Named:
        """What `all` is put into."""
        return self.inner.taken(sums)

    def gathered(self) -> list[Tensor]:
        """What is to be realized after an update."""
        return self.inner.gathered()

    def squares(self, own: Tensor) -> Tensor:
        """The sum of squares over all stages."""
        return all_reduce(self.inner.squares(own), self.pipe, name="squares of gradients of stages")

    def present(self) -> AbstractContextManager[None]:
        """The model has what its graphs read."""
        return self.inner.present()

    def leaves(self) -> Named:
        """What gradients are of."""
        return self.inner.leaves()

    @contextlib.contextmanager
    def saved(self) -> Iterator[Llama | None]:
        """The whole model on the first stage of rank 0's pipeline, which is None on other ranks."""
        if 0 in self.pipe.members: yield gathered(self.model, self.pipe)
        else: yield None


def gathered(model: Llama, pipe: Group) -> Llama | None:
    """The whole model on the first stage, of which each stage has a part, in memory that it shares with this
    one's; None on other stages. All ranks of the group call it."""
    assert model.parallel is not None
    own, config = named(model), model.parallel.whole
    if pipe.rank:
        for name, each in own.items():
            if name != EMBEDDING: send(each.contiguous(), pipe, 0, name).realize()
        return None
    whole = Llama(config, model.dtype, model.device)
    every = named(whole)
    for name, each in own.items(): every[name].replace(each)
    for stage in range(1, pipe.size):
        for name, each in every.items():
            if name in own or _stage_of(name, config.num_layers, pipe.size) != stage: continue
            made = recv(extents(each), each.dtype, pipe, stage, name, model.device)
            each.replace(made.contiguous().realize())
    return whole


def _stage_of(name: str, layers: int, stages: int) -> int:
    """The stage of a parameter that is not on the first one."""
    if (found := LAYER.match(name)) is None: return stages - 1
    return next(i for i in range(stages) if int(found[1]) in stage_layers(layers, i, stages))
