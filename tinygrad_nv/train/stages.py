"""The stages of a pipeline that a rank has, and the whole model that all stages come to.

Protocol: `opened(arguments, directory, device, mesh)` are the `Stages` of a rank: a network for each
(models/parallel.py), whose parameters have the names that they have in the whole one. `Staged` are what a
rank has of them in a step (parts.py): the parts of `inner`, which adds up over the ranks that have the same
stages, and what stages share.

Squares of gradients are added up over stages. A tied embedding is on the first stage, as embedding, and on
the last, as head: the gradients of both are added up before the update, so that both update it alike, and the
squares of the last are left out of the norm.

Within `save()` rank 0 has the whole model, of which each stage sends its part.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tinygrad import Tensor
from tinygrad.dtype import DType

from tinygrad_nv.dist.collectives.functions import all_reduce, extents, recv, send
from tinygrad_nv.dist.group import Group
from tinygrad_nv.dist.mesh import Mesh
from tinygrad_nv.dist.train import schedules
from tinygrad_nv.dist.train.schedules import Schedule
from tinygrad_nv.models.config import ModelConfig, read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.parallel import Parallel, stage_config, stage_layers
from tinygrad_nv.models.shares import LAYER
from tinygrad_nv.models.tied import load_config
from tinygrad_nv.models.weights import EMBEDDING, load
from tinygrad_nv.train import network
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.parts import Named, Parts
from tinygrad_nv.train.replicas import one_rank

CHUNKS = 2      # stages of a rank, where the schedule has several
# by the names of --pipeline-schedule: of ranks and micro-batches
SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {
    "1f1b": schedules.one_f_one_b, "gpipe": schedules.gpipe, "zero-bubble": schedules.zero_bubble_h1,
    "interleaved": lambda ranks, microbatches: schedules.interleave(ranks, microbatches, CHUNKS)}


@dataclass(frozen=True)
class Stages:
    """A rank's stages in a pipeline of the ranks `pipe`, by number. `ends`: the first and the last stage's
    ranks of a tied embedding, on these two; None on others, and where there is none."""
    models: Mapping[int, Llama]
    order: Schedule
    pipe: Group
    ends: Group | None

    @property
    def first(self) -> Llama:
        """The first of the rank's networks."""
        return next(iter(self.models.values()))

    def whole_shapes(self) -> Named:
        """The parameters of all stages by name, without memory."""
        assert self.first.parallel is not None
        return network.parameters(Llama(self.first.parallel.whole, self.first.dtype, self.first.device))

    def parts(self, inner: Parts) -> Staged:
        """Returns the parts of parameters that the rank has."""
        return Staged(self, inner)


def open_stages(arguments: TrainingArguments, directory: Path, device: str | None, mesh: Mesh) -> Stages:
    """Returns this rank's stages with their weights, drawn or read. Raises `ModelError`, `WeightError`."""
    read = read_config if arguments.from_scratch else load_config
    config, pipe = read(directory), mesh.group("pipeline")
    order = SCHEDULES[arguments.pipeline_schedule or "1f1b"](pipe.size, arguments.gradient_accumulation_steps)
    models, ends = stage_models(config, arguments.weights, device, order, pipe.rank), None
    for each in models.values():
        if arguments.from_scratch: network.draw(each, directory, arguments.seed)
        else: load(each, directory)
    if config.tied and pipe.rank in (0, pipe.size - 1):
        assert mesh.world is not None
        ends = mesh.world.group((pipe.members[0], pipe.members[-1]))
    return Stages(models, order, pipe, ends)


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
    """The parts of a rank's stages."""

    def __init__(self, stages: Stages, inner: Parts) -> None:
        self.stages, self.inner, self.pipe, self.ends = stages, inner, stages.pipe, stages.ends
        self.whole, self.optimized, self.added = inner.whole, inner.optimized, inner.added
        self.sharded, self.regions = inner.sharded, inner.regions
        self.joins = inner.joins or self.ends is not None

    def each(self, gradients: Named) -> Named:
        """Returns the gradients of a micro-batch that are added up."""
        return self.inner.each(gradients)

    def all(self, sums: Named) -> Named:
        """Returns the sums that the optimiser takes, as far as it is another."""
        made = self.inner.all(sums) if self.inner.joins else {}
        if self.ends is not None:
            own = made.get(EMBEDDING, sums[EMBEDDING])
            made[EMBEDDING] = all_reduce(own, self.ends, name="gradient of the tied embedding")
        return made

    def take(self, sums: Named) -> Named:
        """Returns the tensors that `all` is put into."""
        return self.inner.take(sums)

    def gather(self) -> list[Tensor]:
        """Returns the tensors to be realized after an update."""
        return self.inner.gather()

    def squares(self, gradients: Named, name: str = "") -> Tensor:
        """The sum of squares over all stages; of a tied embedding the first counts them."""
        own = {each: one for each, one in gradients.items() if not (self.pipe.rank and each == EMBEDDING)}
        made = self.inner.squares(own, name)
        return all_reduce(made, self.pipe, name=f"squares of gradients of stages{name}")

    def present(self) -> AbstractContextManager[None]:
        """The model has what its graphs read."""
        return self.inner.present()

    def leaves(self) -> Named:
        """Returns the tensors that gradients are of."""
        return self.inner.leaves()

    @contextlib.contextmanager
    def save(self, model: Llama) -> Iterator[Llama]:
        """The whole model, on the first stage of rank 0's pipeline."""
        yield (gather_model(self.stages) if 0 in self.pipe.members else None) or model


def gather_model(stages: Stages) -> Llama | None:
    """The whole model on the first rank of a pipeline, of which each rank has stages, in memory that it
    shares with those of its own; None on other ranks. All ranks of the group call it."""
    first, order, pipe = stages.first, stages.order, stages.pipe
    assert first.parallel is not None
    whole = Llama(first.parallel.whole, first.dtype, first.device)
    own = {name: each for model in stages.models.values() for name,
           each in network.name_parameters(model).items()}
    for name, each in network.name_parameters(whole).items():
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
