"""Parts of a checkpoint that a rank of a tensor parallel network reads.

Protocol: `cut_checkpoint` is what loading calls before it plans. `shares` says for each tensor that is cut
which part a rank has: where the shapes of the two networks differ. Entries of floats become entries of these
parts, so that loading reads them and nothing else; those of experts of other ranks are left out. Tensors of
quantised matrices stay whole among the entries: `OwnReader` gives a rank's part of each matrix, and says
which parts of the tensors it reads (quant/cut.py).

Projections that a checkpoint has as one tensor (q | k | v, gate | up) are taken apart first: each is cut by
itself. `sources` says where they lie.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import numpy as np

from tinygrad_nv.quant.cut import part_of
from tinygrad_nv.quant.readers.reader import Get, Reader, Stored, StoredMatrix, TensorPart, reader_of

from .checkpoint import Checkpoint, TensorEntry, safetensors_dtype
from .feed_forward import MixtureOfExperts
from .llama import Llama
from .parallel import Parallel, names_apart, stage_config
from .parts import cut
from .quantised.layers import EMBEDDING, HEAD, Plan, Projection, StoredFloats, projections

TABLES = f"{EMBEDDING}.weight", f"{HEAD}.weight"
LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Source:
    """Place of a projection in a checkpoint: `count` rows from `first` on of a larger one of `rows`."""
    name: str
    rows: int
    first: int
    count: int


def cut_checkpoint(model: Llama, parallel: Parallel, checkpoint: Checkpoint, plan: Plan,
                   shapes: Callable[[Llama], dict[str, tuple[int, ...]]], file: str
                   ) -> tuple[Reader | None, set[str]]:
    """Cuts a checkpoint's entries to what a network's rank has of them: what reads its parts of quantised
    matrices, and biases that it has none of, as another rank adds them. The checkpoint is whole, and `plan`
    that of the whole network; `shapes` are those of a network's tensors."""
    config, every = parallel.whole, checkpoint.entries
    stage = stage_config(config, parallel.stage, parallel.stages)
    there, whole = (Llama(replace(stage, names=names), model.dtype, model.device)
                    for names in (config.names, names_apart(config.names)))
    extents, local = shapes(whole), shapes(model)
    found = shares(extents, local, parallel, TABLES)
    if config.tied:
        embedding, head = TABLES
        extents[head] = extents[embedding]
        if embedding in found: found[head] = found[embedding]
    elsewhere = biases_elsewhere(found, parallel) & local.keys()
    lies, others = sources(there, whole), experts_elsewhere(model)
    quantised = of_stage(dict.fromkeys(_find_quantised(plan)), parallel, config.tied)
    entries = split_entries(of_stage(every, parallel, config.tied), lies, quantised)
    own = {name: share for name, share in found.items() if name not in quantised}
    checkpoint.entries = {name: entry for name, entry in cut_entries(entries, own).items()
                          if name not in elsewhere and not name.startswith(others)}
    if config.quantization is None: return None, elsewhere
    headers = {name: (safetensors_dtype(entry), entry.shape) for name, entry in every.items()}
    reader = reader_of(config.quantization, file)
    return OwnReader(reader, headers, extents, found, lies, parallel.layers.start), elsewhere


def _find_quantised(plan: Plan) -> set[str]:
    """Weights that are no floats in the checkpoint, or not in the network."""
    floats = {part[0].name for layer in plan.layers for part in layer.parts
              if isinstance(part, tuple) and isinstance(part[0], StoredFloats)}
    return plan.replaced - plan.plain.keys() - floats


def shares(whole: Mapping[str, tuple[int, ...]], local: Mapping[str, tuple[int, ...]], parallel: Parallel,
           vocabulary: tuple[str, ...]) -> dict[str, TensorPart]:
    """Returns what a rank has of each tensor that is cut, by the tensors' shapes in both networks. Those that
    several ranks have, such as keys' heads, are the same on neighbours."""
    made = {}
    for name, shape in local.items():
        differ = [axis for axis, (a, b) in enumerate(zip(whole[name], shape, strict=True)) if a != b]
        if not differ: continue
        axis, count = differ[0], shape[differ[0]]
        if name in vocabulary: first, count = parallel.rows(parallel.whole.vocab_size)
        else: first = parallel.first_of(whole[name][axis], count)
        made[name] = TensorPart(axis, first, count)
    return made


T = TypeVar("T")


def of_stage(named: Mapping[str, T], parallel: Parallel, tied: bool) -> dict[str, T]:
    """Returns what belongs to this rank's stage, by the names that its own network has: layers from 0 on."""
    made, layers = dict[str, T](), parallel.layers
    for name, one in named.items():
        found = LAYER.match(name)
        if found is not None:
            if int(found[1]) in layers: made[move_layer(name, -layers.start)] = one
        elif name.startswith("model.embed_tokens."):
            if parallel.first or (tied and parallel.last): made[name] = one
        elif parallel.last: made[name] = one
    return made


def sources(stored: Llama, whole: Llama) -> dict[str, Source]:
    """The projections of `whole`, by their names, that `stored`, a network of the same sizes, has as rows of
    a larger one."""
    made = dict[str, Source]()
    for layer in range(len(whole.blocks)):
        pairs = zip(*(_by_linear(projections(model, layer)) for model in (stored, whole)), strict=True)
        for there, here in pairs:
            if len(there) == len(here): continue
            made |= {each.name: Source(there[0].name, there[0].rows, each.first, each.rows) for each in here}
    return made


def _by_linear(found: Iterable[Projection]) -> list[list[Projection]]:
    return [list(some) for _, some in groupby(found, key=lambda each: id(each.linear))]


def experts_elsewhere(model: Llama) -> tuple[str, ...]:
    """How names of tensors begin that are of experts of other ranks."""
    made, names = list[str](), model.config.names
    for layer, block in enumerate(each.feed_forward for each in model.blocks):
        if not isinstance(block, MixtureOfExperts): continue
        made += [f"model.layers.{layer}.{names.expert.format(i)}." for i in range(block.moe.experts)
                 if i not in block.own]
    return tuple(made)


# **** floats ****

def split_entries(entries: Mapping[str, TensorEntry], found: Mapping[str, Source],
                  quantised: Collection[str]) -> dict[str, TensorEntry]:
    """The entries, those that hold several projections as one for each, unless they are quantised."""
    made = dict(entries)
    for name, source in found.items():
        for kind in ("weight", "bias"):
            larger = f"{source.name}.{kind}"
            if larger in quantised or (entry := entries.get(larger)) is None: continue
            made.pop(larger, None)
            made[f"{name}.{kind}"] = cut(entry, TensorPart(0, source.first, source.count))
    return made


def cut_entries(entries: Mapping[str, TensorEntry],
                found: Mapping[str, TensorPart]) -> dict[str, TensorEntry]:
    """The entries with the parts that are a rank's."""
    return {name: cut(entry, found[name]) if name in found else entry for name, entry in entries.items()}


def biases_elsewhere(names: Mapping[str, TensorPart], parallel: Parallel) -> set[str]:
    """Biases that another rank adds: those of matrices that are cut by columns, whose sum is over ranks."""
    if parallel.group.rank == 0: return set()
    return {f"{name.removesuffix('.weight')}.bias" for name, share in names.items()
            if name.endswith(".weight") and share.axis == 1}


# **** quantised matrices ****

@dataclass(frozen=True)
class OwnReader:
    """Reads a rank's part of each matrix of another reader's, which knows the whole checkpoint, `stored`: of
    `whole` shapes, by names of tensors of this rank's stage, whose layer 0 is the checkpoint's `first`."""
    reader: Reader
    stored: Stored
    whole: Mapping[str, tuple[int, ...]]
    shares: Mapping[str, TensorPart]
    sources: Mapping[str, Source]
    first: int = 0

    def matrix(self, layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix | None:
        """See `Reader`. Raises `WeightError` where a group of one scale would be cut."""
        name, share, source = f"{layer}.weight", self.shares.get(f"{layer}.weight"), self.sources.get(layer)
        n, k = self.whole.get(name, shape)
        if source is None: place, extents = layer, (n, k)
        else:
            place, extents, first = source.name, (source.rows, k), 0 if share is None else share.first
            share = TensorPart(0, source.first + first, shape[0])
        found = part_of(self.reader, move_layer(place, self.first), extents, self.stored, share)
        return self._of_stage(found) if found is not None and self.first else found

    def _of_stage(self, found: StoredMatrix) -> StoredMatrix:
        """A matrix, its tensors by the names that they have in this stage."""
        def arrays(get: Get) -> dict[str, np.ndarray]:
            return found.arrays(lambda name: get(move_layer(name, -self.first)))
        return replace(found, tensors=tuple(move_layer(name, -self.first) for name in found.tensors),
                       arrays=arrays,
                       parts={move_layer(name, -self.first): part for name, part in found.parts.items()})


def move_layer(name: str, by: int) -> str:
    """The name of a tensor in a layer that stands `by` places further behind."""
    return LAYER.sub(lambda found: f"model.layers.{int(found[1]) + by}.", name)
