"""The stages of a pipeline that a rank has, and the whole model that all stages come to.

Protocol: `stage_models(config, dtype, device, order, rank)` are the networks of a rank's stages by number
(models/parallel.py); their parameters have the names that they have in the whole network. `Staged` are the
parts of a rank (parts.py) of them: those of `inner`, which adds up over the ranks that have the same stages,
and what stages share.

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
from tinygrad_nv.dist.train.schedules import Schedule
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.parallel import Parallel, stage_config, stage_layers
from tinygrad_nv.models.shares import LAYER
from tinygrad_nv.models.weights import EMBEDDING
from tinygrad_nv.train.network import named
from tinygrad_nv.train.parts import Named, Parts
from tinygrad_nv.train.replicas import one_rank


def stage_models(config: ModelConfig, dtype: DType, device: str | None, order: Schedule,
                 rank: int) -> dict[int, Llama]:
    """The networks of a rank's stages, without weights. Raises `ModelError` for more stages than layers."""
    made = dict[int, Llama]()
    for number in range(rank, order.stages, len(order.ranks)):
        # a group that only says which of how many stages this is
        parallel = Parallel(one_rank(), config, Group("stages", range(order.stages), number, 0.0))
        made[number] = Llama(stage_config(config, number, order.stages), dtype, device, parallel=parallel)
    return made


class Staged:
    """The parts of a rank's stages. `ends`: the first and the last stage's ranks of a tied embedding, on
    these two; None on others, and where there is none."""

    def __init__(self, models: Mapping[int, Llama], inner: Parts, order: Schedule, pipe: Group,
                 ends: Group | None) -> None:
        self.models, self.inner, self.order, self.pipe, self.ends = models, inner, order, pipe, ends
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
        if 0 in self.pipe.members: yield gathered(self.models, self.order, self.pipe)
        else: yield None


def gathered(models: Mapping[int, Llama], order: Schedule, pipe: Group) -> Llama | None:
    """The whole model on the first rank of a pipeline, of which each rank has stages, in memory that it
    shares with those of its own; None on other ranks. All ranks of the group call it."""
    first = next(iter(models.values()))
    assert first.parallel is not None
    whole = Llama(first.parallel.whole, first.dtype, first.device)
    own = {name: each for model in models.values() for name, each in named(model).items()}
    for name, each in named(whole).items():
        source = order.rank_of(_stage_of(name, whole.config.num_layers, order.stages))
        if source == pipe.rank:
            if pipe.rank: send(own[name].contiguous(), pipe, 0, name).realize()
            else: each.replace(own[name])
        elif not pipe.rank:
            made = recv(extents(each), each.dtype, pipe, source, name, first.device)
            each.replace(made.contiguous().realize())
    return None if pipe.rank else whole


def _stage_of(name: str, layers: int, stages: int) -> int:
    """The stage of a parameter, the first that has it."""
    if name == EMBEDDING: return 0
    if (found := LAYER.match(name)) is None: return stages - 1
    return next(i for i in range(stages) if int(found[1]) in stage_layers(layers, i, stages))
