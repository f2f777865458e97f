"""Plans of what a rank loads: its part of a model, and the pages that it has room for.

Protocol: rank 0 makes a `RunnerPlan` of what it was asked for. `pages_of(rank, …)` says how many pages a rank
has room for, and `load_rank(…)` makes the same model runner on every rank, of another part of the weights.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tinygrad import dtypes
from tinygrad.dtype import DType

from tinygrad_nv.engine.loading import weights_identity
from tinygrad_nv.engine.memory_planning import CacheSize, layer_bytes, require_room, step_bytes
from tinygrad_nv.engine.scheduling.scheduler_output import max_prompt_logits
from tinygrad_nv.engine.worker.kv_cache_dtype import resolve_kv_cache_dtype
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.kvcache.groups import CacheGroups

if TYPE_CHECKING:
    from tinygrad_nv.dist.group import Group, World
    from tinygrad_nv.engine.executor.followers import Followers
    from tinygrad_nv.engine.speculation.draft_model import DraftModelFiles
    from tinygrad_nv.models.config import ModelConfig
    from tinygrad_nv.models.llama import Llama
    from tinygrad_nv.models.parallel import Parallel


# by tinygrad's names, which a process can tell another
FLOATS = {each.name: each for each in (dtypes.float32, dtypes.float16, dtypes.bfloat16)}


@dataclass(frozen=True)
class RunnerPlan:
    """Arguments of a model and its runner; `model_runner.py` says what they mean. `config` is that of the
    whole model, quantised as was asked for (engine/loading.py). With `experts` each rank has whole
    experts."""
    directory: Path
    config: ModelConfig
    dtype: str
    device: str
    length: int
    num_pages: int
    page_size: int
    max_seqs: int
    max_batched_tokens: int
    kv_dtype: str
    host_pages: int
    groups: CacheGroups
    verifies: bool
    int8_inputs: bool
    tensor_ranks: int = 1
    stages: int = 1
    experts: bool = False
    num_states: int = 0

    @property
    def ranks(self) -> int:
        """Number of ranks that have a replica of the model together."""
        return self.tensor_ranks * self.stages

    @property
    def tinygrad_dtype(self) -> DType:
        """The dtype of weights."""
        return FLOATS[self.dtype]


@dataclass(frozen=True)
class PageBudget:
    """Budget of pages: as many as were asked for, or those that fit into the fraction `utilization` of a
    GPU's memory."""
    asked: int | None
    utilization: float


@dataclass(frozen=True)
class Place:
    """A rank of a group that is not made yet."""
    rank: int
    size: int


def place_of(rank: int, plan: RunnerPlan) -> tuple[Place, Place]:
    """A rank's stage, and its number among the ranks of that. Ranks of a stage stand one after the other,
    those of the last stage first: the one that leads a replica has the logits."""
    behind, number = divmod(rank % plan.ranks, plan.tensor_ranks)
    return Place(plan.stages - 1 - behind, plan.stages), Place(number, plan.tensor_ranks)


def config_of(rank: int, plan: RunnerPlan) -> ModelConfig:
    """Returns the config of the part which a rank has."""
    if plan.ranks == 1: return plan.config
    from tinygrad_nv.models.parallel import local_config, stage_config
    stage, _ = place_of(rank, plan)
    return local_config(stage_config(plan.config, stage.rank, stage.size), plan.tensor_ranks, plan.experts)


@dataclass(frozen=True)
class Part:
    """A rank's part of a model: what it computes, and how layers lie in its pages."""
    parallel: Parallel
    config: ModelConfig
    groups: CacheGroups


def part_of(world: World, plan: RunnerPlan) -> Part:
    """Returns this rank's part. Every rank of a replica has to call it. Opens the workspaces of sums over
    GPUs, which steps that are kept on disk use."""
    from tinygrad_nv.dist.collectives import device
    from tinygrad_nv.models import parallel
    whole, tensor, size = plan.config, plan.tensor_ranks, plan.ranks
    first = world.rank // size * size
    behind, number = divmod(world.rank - first, tensor)
    group = world.group(range(first + behind * tensor, first + behind * tensor + tensor))
    if tensor > 1 and device.serves(plan.device): device.prepare(group, plan.device)
    pipe = every = None
    if plan.stages > 1:
        pipe = world.group(range(first + number, first + size, tensor)[::-1])
        every = world.group(range(first, first + size))
    made = parallel.Parallel(group, whole, pipe, every, plan.experts)
    groups = plan.groups if pipe is None else parallel.stage_groups(plan.groups, made.layers)
    return Part(made, config_of(world.rank, plan), groups)


def weight_bytes_of(rank: int, plan: RunnerPlan) -> int:
    """Bytes of the weights that a rank has. Groups are made when all ranks load; here only rank and size are
    asked for."""
    from tinygrad_nv.models import weights
    from tinygrad_nv.models.llama import Llama
    if plan.ranks == 1: return weights.nbytes(plan.config, plan.tinygrad_dtype, plan.directory)
    from tinygrad_nv.models.parallel import Parallel
    stage, number = place_of(rank, plan)
    made = Parallel(cast("Group", number), plan.config, cast("Group", stage) if stage.size > 1 else None,
                    experts=plan.experts)
    return weights.own_nbytes(Llama(config_of(rank, plan), plan.tinygrad_dtype, plan.device, parallel=made),
                              plan.directory)


def token_bytes_of(rank: int, plan: RunnerPlan, draft: DraftModelFiles | None = None) -> int:
    """Bytes of keys and values of a token, in the layers of a rank's stage and in those of a draft model."""
    stored = resolve_kv_cache_dtype(plan.kv_dtype, plan.tinygrad_dtype, plan.config.quantization)
    layers = -(-plan.groups.layers_per_page // plan.stages)
    return layer_bytes(config_of(rank, plan), stored) * layers + (draft.token_bytes if draft else 0)


def pages_of(rank: int, plan: RunnerPlan, budget: PageBudget, held: int,
             draft: DraftModelFiles | None = None) -> int:
    """Pages of the KV cache of a rank: as many as were asked for, or as fit beside `held` bytes of weights
    and a step. Raises where there is no room."""
    whole, dtype, token = plan.config, plan.tinygrad_dtype, token_bytes_of(rank, plan, draft)
    held += plan.num_states * whole.state_bytes(dtype)
    cache = CacheSize(plan.page_size, plan.page_size * token, plan.length, plan.max_seqs, plan.groups,
                      plan.max_batched_tokens)
    pages = cache.min_pages if budget.asked is None else budget.asked
    require_room(plan.device, whole, dtype, plan.length, pages * cache.page_size, budget.utilization, token,
                 held)
    if budget.asked is not None: return budget.asked
    step = step_bytes(whole, dtype, cache.chunk + cache.max_seqs,
                      cache.max_seqs + max_prompt_logits(cache.max_seqs))
    return cache.num_pages(plan.device, held + (draft.weight_bytes if draft else 0), step)


def device_of(world: World, device: str, visible: str | None) -> str:
    """Returns this rank's device: of GPUs the one with its number on its host, unless a launcher lets it see
    one alone (`visible` is CUDA_VISIBLE_DEVICES)."""
    kind, _, number = device.partition(":")
    if kind != "CUDA" or world.ranks.local_world_size == 1: return device
    if visible is not None and "," not in visible: return device
    return f"{kind}:{int(number or 0) + world.ranks.local_rank}"


def on_rank(world: World, plan: RunnerPlan) -> RunnerPlan:
    """The plan with this rank's device."""
    return replace(plan, device=device_of(world, plan.device, os.environ.get("CUDA_VISIBLE_DEVICES")))


def load_rank(world: World, plan: RunnerPlan, followers: Followers | None = None,
              progress: Callable[[int, int], None] | None = None,
              stage: Callable[[str], None] = lambda name: None) -> ModelRunner:
    """The runner of this rank's part. Every rank of a replica has to call it."""
    plan = on_rank(world, plan)
    if plan.ranks == 1:
        model = load_weights(plan, plan.config, None, progress, stage)
        return make_runner(plan, model, directory=plan.directory)
    part = part_of(world, plan)
    model = load_weights(plan, part.config, part.parallel, progress, stage)
    return make_runner(replace(plan, groups=part.groups), model, followers)


def load_weights(plan: RunnerPlan, config: ModelConfig, parallel: Parallel | None,
                 progress: Callable[[int, int], None] | None = None,
                 stage: Callable[[str], None] = lambda name: None) -> Llama:
    """The network of `config`, that of this rank, with its weights."""
    from tinygrad_nv.models import weights
    from tinygrad_nv.models.llama import Llama
    model = Llama(config, plan.tinygrad_dtype, plan.device, positions=plan.length, parallel=parallel)
    # float32 that is asked for by name stays what it is
    model.int8_inputs |= plan.int8_inputs
    stage("read files")
    weights.load(model, plan.directory, progress)
    stage("load weights")
    return model


def make_runner(plan: RunnerPlan, model: Llama, followers: Followers | None = None,
                **more: Any) -> ModelRunner:
    """The runner of a network, with its pages."""
    p = plan
    return ModelRunner(model, pages=p.num_pages, page_size=p.page_size, max_seqs=p.max_seqs, max_len=p.length,
                       max_batched_tokens=p.max_batched_tokens, kv_dtype=p.kv_dtype, host_pages=p.host_pages,
                       groups=p.groups, states=p.num_states, verifies=p.verifies, followers=followers,
                       identity="" if "bundled" in more else weights_identity(p.directory), **more)
