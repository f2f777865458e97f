"""Tensor parallel networks: what one rank has of a decoder, and of its checkpoint.

Protocol (Megatron-LM, arXiv 1909.08053): a rank has some heads of each attention and some columns of each
feed-forward half. q|k|v and gate|up are cut by rows, the matrices behind them by columns, so that a rank's
half of a layer is that of a smaller network; the sum over ranks is what the whole network adds
(`Parallel.summed`). Norms and routers are on every rank. Key and value heads are cut, or stand on several
ranks where there are fewer than ranks. The vocabulary is cut by rows: a rank embeds its own tokens, the
others add zeros, and logits are gathered.

In a pipeline (GPipe, arXiv 1811.06965) a rank has a stage: some layers, the embedding if it is the first,
norm and head if it is the last. Hidden states go from stage to stage.

`local_config(config, ranks, stage, stages)` is the smaller network's config. `shares(whole, local, rank)`
says for each tensor of a checkpoint which part a rank has: where the shapes of the two networks differ.
`own_entries` cuts the entries, so that loading reads a rank's part of the files and nothing else.
"""
from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.dist.collectives.functions import all_gather, all_reduce, broadcast, copied, recv, send
from tinygrad_nv.dist.group import Group
from tinygrad_nv.errors import DistError, ModelError, NVError
from tinygrad_nv.functional import embedding
from tinygrad_nv.kvcache.groups import CacheGroups

from .checkpoint import ITEM_BYTES, TensorEntry
from .config import ModelConfig


@dataclass(frozen=True)
class Parallel:
    """The ranks that have a network of the config `whole` together: `group` has each layer of this rank's
    stage, `pipe` a rank of each stage, `world` are all."""
    group: Group
    whole: ModelConfig
    pipe: Group | None = None
    world: Group | None = None

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.group.size

    @property
    def groups(self) -> list[Group]:
        """All that this rank calls collectives of."""
        return [each for each in (self.group, self.pipe, self.world) if each is not None]

    @property
    def facts(self) -> tuple[object, ...]:
        """What a step depends on: which part it is of what."""
        return "rank", *((each.name, each.rank, each.size) for each in self.groups)

    @property
    def stage(self) -> int:
        """Of this rank."""
        return 0 if self.pipe is None else self.pipe.rank

    @property
    def stages(self) -> int:
        """How many there are."""
        return 1 if self.pipe is None else self.pipe.size

    @property
    def first(self) -> bool:
        """Whether this stage embeds."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this stage makes logits."""
        return self.stage == self.stages - 1

    @property
    def layers(self) -> range:
        """Those of this stage, of the whole network."""
        return stage_layers(self.whole.num_layers, self.stage, self.stages)

    def received(self, tokens: int, dtype: DType, device: str) -> Tensor:
        """The hidden states (1, T, hidden) of the stage before."""
        assert self.pipe is not None
        shape = 1, tokens, self.whole.hidden_size
        return recv(shape, dtype, self.pipe, self.stage - 1, name="hidden states", device=device)

    def passed(self, x: Tensor) -> Tensor:
        """Sends hidden states to the stage behind: what is to be realized."""
        assert self.pipe is not None
        return send(x, self.pipe, self.stage + 1, name="hidden states")

    def summed(self, x: Tensor, name: str) -> Tensor:
        """What the halves of a layer on all ranks add."""
        return all_reduce(x, self.group, replicated=True, name=name)

    def begun(self, x: Tensor, name: str) -> Tensor:
        """The input of a half of a layer, whose gradient is the sum of the ranks'."""
        return copied(x, self.group, name)

    def check(self) -> None:
        """Raises `DistError` if a collective has failed."""
        for each in self.groups: each.check()

    def failure(self, error: BaseException) -> BaseException:
        """What ends all ranks, for an error of a step of this one."""
        if isinstance(error, DistError): return error
        every = self.world or self.group
        why = error.found if isinstance(error, NVError) else error
        made = DistError(f"a step failed on rank {every.members[every.rank]}: {type(error).__name__}: "
                         f"{why}", "the same steps on all ranks", "load the model again")
        made.__cause__ = error
        return made

    def agreed(self, tokens: Tensor) -> Tensor:
        """Sampled tokens, those of the first rank of the last stage: the same on all, also where processors
        differ."""
        every = self.world or self.group
        return broadcast(tokens, every, 0, name="tokens")

    def table_rows(self, vocab_size: int) -> int:
        """Rows of the vocabulary that a rank has room for."""
        return -(-vocab_size // self.ranks)

    def rows(self, vocab_size: int) -> tuple[int, int]:
        """The tokens that this rank has: the first, and how many. The last ranks may have fewer, and rows of
        nothing below them."""
        each = self.table_rows(vocab_size)
        first = min(self.group.rank * each, vocab_size)
        return first, min(each, vocab_size - first)

    def embedded(self, table: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
        """Rows of a table (rows of this rank, H) by tokens of the whole vocabulary."""
        first, count = self.rows(vocab_size)
        # the lookup gives 0 for a number of no row
        own = ((tokens >= first) & (tokens < first + count)).where(tokens - first, int(table.shape[0]))
        return self.summed(embedding(table, own.cast(dtypes.int32)), "embedding")

    def gathered(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Logits (…, V) of the rows of all ranks."""
        return all_gather(logits, self.group, axis=-1, name="logits")[..., :vocab_size]


def stage_layers(layers: int, stage: int, stages: int) -> range:
    """The layers of a stage: as many in each, or one more in some."""
    return range(layers * stage // stages, layers * (stage + 1) // stages)


def stage_config(config: ModelConfig, stage: int, stages: int) -> ModelConfig:
    """What a stage of a pipeline computes. Raises `ModelError` for more stages than layers."""
    if stages == 1: return config
    if stages > config.num_layers:
        raise ModelError(f"{stages} stages of a pipeline, and num_hidden_layers is {config.num_layers}",
                         f"at most {config.num_layers}", "change --pipeline-parallel-size")
    found = stage_layers(config.num_layers, stage, stages)
    own, moe = slice(found.start, found.stop), config.moe
    if moe is not None: moe = replace(moe, layers=moe.layers[own])
    return replace(config, num_layers=len(found), ropes=config.ropes[own], windows=config.windows[own],
                   moe=moe)


def stage_groups(groups: CacheGroups, layers: range) -> CacheGroups:
    """Where a stage keeps its layers in pages: the same tables, and only its own layers in each page."""
    used = [0] * len(groups.windows)
    places = []
    for group, _ in groups.places[layers.start:layers.stop]:
        places.append((group, used[group]))
        used[group] += 1
    return replace(groups, places=tuple(places), layers_per_page=max(used))


def local_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """What one of `ranks` computes. Raises `ModelError` where it cannot be cut."""
    if ranks == 1: return config
    _require_cut(config, ranks)
    moe = config.moe
    if moe is not None:
        moe = replace(moe, width=moe.width // ranks, shared_width=moe.shared_width // ranks)
    return replace(config, num_heads=config.num_heads // ranks,
                   num_kv_heads=max(config.num_kv_heads // ranks, 1),
                   intermediate_size=config.intermediate_size // ranks, moe=moe)


def _require_cut(config: ModelConfig, ranks: int) -> None:
    def refuse(found: str, expected: str) -> ModelError:
        return ModelError(f"{ranks} tensor parallel ranks, and {found}", expected,
                          "change --tensor-parallel-size")
    unfit = [f"{name} is {extent}" for name, extent in (
        ("num_attention_heads", config.num_heads), ("intermediate_size", config.intermediate_size),
        *([] if config.moe is None else [("the width of an expert", config.moe.width),
                                         ("the width of the shared expert", config.moe.shared_width)]))
             if extent % ranks]
    if unfit: raise refuse(unfit[0], f"a multiple of {ranks}")
    if config.num_kv_heads % ranks and ranks % config.num_kv_heads:
        raise refuse(f"num_key_value_heads is {config.num_kv_heads}",
                     f"a multiple or a divisor of {ranks}")
    for found, what in ((config.quantization, "weights are quantised"),
                        (config.latent, "attention is latent (MLA)"),
                        (config.qk_norm == "all", "norms of queries span all heads")):
        if not found: continue
        raise refuse(f"{what}, which is not cut yet", "a model of float weights with heads of its own")


@dataclass(frozen=True)
class Share:
    """Elements [first, first + count) along an axis of a checkpoint's tensor."""
    axis: int
    first: int
    count: int


def shares(whole: Mapping[str, tuple[int, ...]], local: Mapping[str, tuple[int, ...]], parallel: Parallel,
           vocabulary: tuple[str, ...]) -> dict[str, Share]:
    """What a rank has of each tensor that is cut, by the tensors' shapes in both networks. Those that several
    ranks have, such as keys' heads, are the same on neighbours."""
    made = {}
    for name, shape in local.items():
        differ = [axis for axis, (a, b) in enumerate(zip(whole[name], shape, strict=True)) if a != b]
        if not differ: continue
        axis, count = differ[0], shape[differ[0]]
        if name in vocabulary: first, count = parallel.rows(parallel.whole.vocab_size)
        else: first = parallel.group.rank * (whole[name][axis] // count) // parallel.ranks * count
        made[name] = Share(axis, first, count)
    return made


T = TypeVar("T")


def of_stage(named: Mapping[str, T], parallel: Parallel, tied: bool) -> dict[str, T]:
    """What belongs to this rank's stage, by the names that its own network has: layers from 0 on."""
    made, layers = {}, parallel.layers
    for name, one in named.items():
        found = re.match(r"model\.layers\.(\d+)\.", name)
        if found is not None:
            if int(found[1]) in layers:
                made[f"model.layers.{int(found[1]) - layers.start}.{name[found.end():]}"] = one
        elif name.startswith("model.embed_tokens."):
            if parallel.first or (tied and parallel.last): made[name] = one
        elif parallel.last: made[name] = one
    return made


def own_entries(entries: Mapping[str, TensorEntry], found: Mapping[str, Share]) -> dict[str, TensorEntry]:
    """The entries with the parts that are a rank's."""
    return {name: cut(entry, found[name]) if name in found else entry for name, entry in entries.items()}


def cut(entry: TensorEntry, share: Share) -> TensorEntry:
    """A part of an entry: of rows as they lie, of columns with strides."""
    strides = entry.strides or tuple(math.prod(entry.shape[i + 1:]) for i in range(len(entry.shape)))
    shape = (*entry.shape[:share.axis], share.count, *entry.shape[share.axis + 1:])
    path, offset = entry.file_offset
    whole = entry.strides is None and share.axis == 0
    return replace(entry, shape=shape, strides=None if whole else strides,
                   file_offset=(path, offset + share.first * strides[share.axis] * ITEM_BYTES[entry.dtype]))


def added_elsewhere(names: Mapping[str, Share], parallel: Parallel) -> set[str]:
    """Biases that another rank adds: those of matrices that are cut by columns, whose sum is over ranks."""
    if parallel.group.rank == 0: return set()
    return {f"{name.removesuffix('.weight')}.bias" for name, share in names.items()
            if name.endswith(".weight") and share.axis == 1}
