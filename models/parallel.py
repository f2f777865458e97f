"""Tensor parallel networks: what one rank has of a decoder, and of its checkpoint.

Protocol (Megatron-LM, arXiv 1909.08053): a rank has some heads of each attention and some columns of each
feed-forward half. q|k|v and gate|up are cut by rows, the matrices behind them by columns, so that a rank's
half of a layer is that of a smaller network; the sum over ranks is what the whole network adds
(`Parallel.sum_halves`). Norms and routers are on every rank. Key and value heads are cut, or stand on several
ranks where there are fewer than ranks. Of latent attention heads are cut, and every rank computes and caches
the latents. The vocabulary is cut by rows (`VocabularyPart`): a rank embeds its own tokens, the others add
zeros, and a rank has the logits of its own tokens, which are gathered where all are needed.

Experts are cut as the dense half is. With `experts` (expert parallel) a rank has some of them whole instead,
and its part of the shared one: every rank chooses experts for all tokens, slots of experts elsewhere add 0
here, and the sum over ranks is the same.

In a pipeline (GPipe, arXiv 1811.06965) a rank has a stage: some layers, the embedding if it is the first,
norm and head if it is the last. Hidden states go from stage to stage.

`local_config(stage_config(config, …), ranks)` is the smaller network's config. Which part of a checkpoint a
rank reads says shares.py.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.dist.collectives.functions import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    copy_to_ranks,
    recv,
    send,
)
from tinygrad_nv.dist.collectives.peer_norm import all_reduce_norm
from tinygrad_nv.dist.group import Group
from tinygrad_nv.dist.train.sequence import SequenceParallel
from tinygrad_nv.errors import DistError, ModelError, NVError
from tinygrad_nv.kvcache.groups import CacheGroups

from .config import ModelConfig
from .layer_config import Names

ALIGNED = 8     # tokens: the logits of a rank are whole vectors, and begin with an even token


# slots: tinygrad looks for a network's tensors in every __dict__, and would find drivers in those of groups
@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The part of a rank of `group` of a vocabulary of `size` tokens: `tokens`. The last may be beyond the
    vocabulary, so that all ranks have as many."""
    group: Group
    size: int
    tokens: range

    @property
    def count(self) -> int:
        """How many of them are in the vocabulary."""
        return min(max(self.size - self.tokens.start, 0), len(self.tokens))

    def pad_logits(self, logits: Tensor) -> Tensor:
        """Logits (…, tokens) of rows of this rank's matrix: -inf beyond the vocabulary."""
        missing = len(self.tokens) - self.count
        if not missing: return logits
        pad = (*(None,) * (logits.ndim - 1), (0, missing))
        return logits[..., :self.count].pad(pad, value=-math.inf)

    def gather(self, x: Tensor) -> Tensor:
        """(…, size) of the parts of all ranks, which are like x, (…, tokens)."""
        if self.group.size == 1: return x
        parts = self._of_all(x, "logits").permute(*range(1, x.ndim), 0, x.ndim)
        return parts.reshape(*x.shape[:-1], -1)[..., :self.size].contiguous()

    def rows(self, count: int) -> slice:
        """Returns which of so many rows this rank gets whole: a share, or all where shares are not equal."""
        each, left = divmod(count, self.group.size)
        return slice(0, count) if left else slice(self.group.rank * each, (self.group.rank + 1) * each)

    def whole_rows(self, x: Tensor) -> Tensor:
        """Returns these rows, (rows, size), of the parts of all ranks, which are like x, (R, tokens)."""
        if int(x.shape[0]) % self.group.size: return self.gather(x)
        return all_to_all(x, self.group, 0, 1, name="rows of logits")[:, :self.size].contiguous()

    def of_all_rows(self, x: Tensor, count: int) -> Tensor:
        """(count,) of each rank's (rows,)."""
        return x if int(x.shape[0]) == count else all_gather(x, self.group, name="tokens of rows")

    def most(self, x: Tensor) -> Tensor:
        """The largest of all ranks', elementwise."""
        return self._of_all(x, "largest logits").max(0)

    def _of_all(self, x: Tensor, name: str) -> Tensor:
        """(ranks, …)"""
        return all_gather(x.unsqueeze(0), self.group, name=name)


@dataclass(frozen=True, slots=True)
class Parallel:
    """The ranks that have a network of the config `whole` together: `group` has each layer of this rank's
    stage, `pipe` a rank of each stage, `world` are all. With `experts` a rank has some experts whole, not a
    part of each. With `sequence` it has its tokens alone between halves of layers (dist/train/sequence.py);
    their number is a multiple of the ranks' then."""
    group: Group
    whole: ModelConfig
    pipe: Group | None = None
    world: Group | None = None
    experts: bool = False
    sequence: bool = False

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
        """Facts that a step depends on: which part it is of what, and whether kernels over the memory of
        peers sum (they have to be opened before)."""
        return "rank", self.experts, *((each.name, each.rank, each.size, bool(each.workspaces))
                                       for each in self.groups)

    @property
    def stage(self) -> int:
        """Stage of this rank."""
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
        """Layers of this stage, of the whole network."""
        return stage_layers(self.whole.num_layers, self.stage, self.stages)

    def receive(self, tokens: int, dtype: DType, device: str) -> Tensor:
        """The hidden states (1, T, hidden) of the stage before."""
        assert self.pipe is not None
        shape = 1, tokens, self.whole.hidden_size
        return recv(shape, dtype, self.pipe, self.stage - 1, name="hidden states", device=device)

    def pass_on(self, x: Tensor) -> Tensor:
        """Sends hidden states to the stage behind: what is to be realized."""
        assert self.pipe is not None
        return send(x, self.pipe, self.stage + 1, name="hidden states")

    def sum_halves(self, x: Tensor, name: str) -> Tensor:
        """Sums the halves of a layer over all ranks."""
        if self.sequence: return SequenceParallel(self.group).sum_halves(x, name)
        return all_reduce(x, self.group, replicated=True, name=name)

    def sum_and_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float,
                    name: str) -> tuple[Tensor, Tensor] | None:
        """The RMSNorm of the residual with what halves of a layer add on all ranks, and that residual; None
        where no kernel does both."""
        if self.sequence: return None
        return all_reduce_norm(x, residual, weight, eps, self.group, name)

    def begin_half(self, x: Tensor, name: str) -> Tensor:
        """The input of a half of a layer, whose gradient is the sum of the ranks'."""
        if self.sequence: return SequenceParallel(self.group).begin_half(x, name)
        return copy_to_ranks(x, self.group, name)

    def gather_tokens(self, x: Tensor) -> Tensor:
        """All tokens of the last layer's normalised output, for this rank's part of the vocabulary."""
        return SequenceParallel(self.group).begin_half(x, "norm") if self.sequence else x

    def to_head(self, x: Tensor) -> Tensor:
        """Passes on what `gather_tokens` gave, whose gradient is the sum of those of the ranks' parts of the
        vocabulary."""
        return x if self.sequence else copy_to_ranks(x, self.group, "head")

    def mean(self, x: Tensor, name: str) -> Tensor:
        """The mean of the ranks'. Of what several ranks have it counts each alike."""
        return all_reduce(x, self.group, name=name) / self.ranks

    def check(self) -> None:
        """Raises `DistError` if a collective has failed."""
        for each in self.groups: each.check()

    def failure(self, error: BaseException) -> BaseException:
        """Returns the error that ends all ranks, for an error of a step of this one."""
        if isinstance(error, DistError): return error
        every = self.world or self.group
        why = error.found if isinstance(error, NVError) else error
        made = DistError(f"a step failed on rank {every.members[every.rank]}: {type(error).__name__}: "
                         f"{why}", "the same steps on all ranks", "load the model again")
        made.__cause__ = error
        return made

    def agree_on(self, tokens: Tensor) -> Tensor:
        """Sampled tokens, those of the first rank of the stage: the same on all of it, also where processors
        differ."""
        return broadcast(tokens, self.group, 0, name="tokens")

    def own_experts(self, count: int) -> range:
        """The experts of this rank, of `count`. The first ranks may have one more than the last."""
        if not self.experts: return range(count)
        each, more = divmod(count, self.ranks)
        first = self.group.rank * each + min(self.group.rank, more)
        return range(first, first + each + (self.group.rank < more))

    def own_heads(self, heads: int) -> range:
        """The key heads of this rank, of all: some, or one that other ranks have, too."""
        count = max(heads // self.ranks, 1)
        first = self.first_of(heads, count)
        return range(first, first + count)

    def first_of(self, extent: int, count: int) -> int:
        """Returns where this rank's `count` of an extent begin. Of fewer parts than ranks, neighbours have
        the same."""
        return self.group.rank * (extent // count) // self.ranks * count

    def table_rows(self, vocab_size: int) -> int:
        """Rows of the vocabulary that a rank has room for."""
        return vocab_size if self.ranks == 1 else -(-vocab_size // (self.ranks * ALIGNED)) * ALIGNED

    @property
    def vocabulary(self) -> VocabularyPart:
        """Part of the vocabulary that this rank has."""
        each, rank = self.table_rows(self.whole.vocab_size), self.group.rank
        return VocabularyPart(self.group, self.whole.vocab_size, range(rank * each, rank * each + each))

    @property
    def parts(self) -> VocabularyPart | None:
        """The same, if there are several."""
        return self.vocabulary if self.ranks > 1 else None

    def rows(self, vocab_size: int) -> tuple[int, int]:
        """The tokens that this rank has: the first, and how many. The last ranks may have fewer, and rows of
        nothing below them."""
        each = self.table_rows(vocab_size)
        first = min(self.group.rank * each, vocab_size)
        return first, min(each, vocab_size - first)

    def embed(self, read: Callable[[Tensor], Tensor], tokens: Tensor, vocab_size: int) -> Tensor:
        """Rows of a table by tokens of the whole vocabulary; `read` gives those of tokens of this rank."""
        first, count = self.rows(vocab_size)
        own = (tokens >= first) & (tokens < first + count)
        found = read(own.where(tokens - first, 0).cast(dtypes.int32))
        return self.sum_halves(own.unsqueeze(-1).where(found, 0), "embedding")


def stage_layers(layers: int, stage: int, stages: int) -> range:
    """The layers of a stage: as many in each, or one more in some."""
    return range(layers * stage // stages, layers * (stage + 1) // stages)


def stage_config(config: ModelConfig, stage: int, stages: int) -> ModelConfig:
    """Returns the configuration of a stage of a pipeline. Raises `ModelError` for more stages than layers
    and for layers that keep states."""
    if stages == 1: return config
    _require_whole_layers(config)
    if stages > config.num_layers:
        raise ModelError(f"{stages} stages of a pipeline, and num_hidden_layers is {config.num_layers}",
                         f"at most {config.num_layers}", "change --pipeline-parallel-size")
    found = stage_layers(config.num_layers, stage, stages)
    own, moe = slice(found.start, found.stop), config.moe
    if moe is not None: moe = replace(moe, layers=moe.layers[own])
    return replace(config, num_layers=len(found), ropes=config.ropes[own], windows=config.windows[own],
                   moe=moe)


def stage_groups(groups: CacheGroups, layers: range) -> CacheGroups:
    """Returns where a stage keeps its layers in pages: the same tables, and only its own layers in each
    page."""
    used = [0] * len(groups.windows)
    places = []
    for group, _ in groups.places[layers.start:layers.stop]:
        places.append((group, used[group]))
        used[group] += 1
    return replace(groups, places=tuple(places), layers_per_page=max(used))


def local_config(config: ModelConfig, ranks: int, experts: bool = False) -> ModelConfig:
    """Returns the configuration of one of `ranks`; with `experts` it has some of them whole. Raises
    `ModelError` where it cannot be cut."""
    if ranks == 1: return config
    _require_whole_layers(config)
    _require_cut(config, ranks, experts)
    moe = config.moe
    if moe is not None:
        moe = replace(moe, width=moe.width if experts else moe.width // ranks,
                      shared_width=moe.shared_width // ranks)
    return replace(config, num_heads=config.num_heads // ranks,
                   num_kv_heads=max(config.num_kv_heads // ranks, 1),
                   intermediate_size=config.intermediate_size // ranks, moe=moe,
                   names=names_apart(config.names))


def names_apart(names: Names) -> Names:
    """Names of which each is of one projection: a rank has a part of each, so what a checkpoint has as one
    tensor is listed in several (shares.py)."""
    if len(names.qkv) == 1:
        above = names.qkv[0].rpartition(".")[0]
        names = replace(names, qkv=(f"{above}.q_proj", f"{above}.k_proj", f"{above}.v_proj"))
    if len(names.gate_up) == 1:
        above = names.gate_up[0].rpartition(".")[0]
        names = replace(names, gate_up=(f"{above}.gate_proj", f"{above}.up_proj"))
    return names


def _require_whole_layers(config: ModelConfig) -> None:
    """Refuses layers that no code splits among ranks. Raises `ModelError`."""
    if config.has_states: what = "keep states"
    elif config.normed_sums is not None: what = "add to their normalised input"
    else: return
    raise ModelError(f"{config.architecture}, whose layers {what}, on several ranks",
                     "one rank", "use data parallelism, or a quantised model that fits one GPU")


def _require_cut(config: ModelConfig, ranks: int, experts: bool) -> None:
    def refuse(found: str, expected: str) -> ModelError:
        return ModelError(f"{ranks} tensor parallel ranks, and {found}", expected,
                          "change --tensor-parallel-size")
    moe, extents = config.moe, {"num_attention_heads": config.num_heads}
    if moe is None or not all(moe.layers): extents["intermediate_size"] = config.intermediate_size
    if moe is not None:
        if not experts: extents["the width of an expert"] = moe.width
        elif moe.experts < ranks: raise refuse(f"{moe.experts} experts", f"{ranks} experts at least")
        extents["the width of the shared expert"] = moe.shared_width
    elif experts:
        raise ModelError("expert parallel ranks, and the model has no experts", "a mixture of experts",
                         "leave out --enable-expert-parallel")
    unfit = [f"{name} is {extent}" for name, extent in extents.items() if extent % ranks]
    if unfit: raise refuse(unfit[0], f"a multiple of {ranks}")
    heads = config.num_kv_heads
    if config.latent is None and heads % ranks and ranks % heads:
        raise refuse(f"num_key_value_heads is {heads}", f"a multiple or a divisor of {ranks}")
