"""What a rank loads: its part of a model, and the pages that it has room for.

Protocol: rank 0 makes a `RunnerPlan` of what it was asked for. `load(plan, parallel, …)` makes the same model
runner on every rank, of another part of the weights.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygrad import dtypes
from tinygrad.dtype import DType

from tinygrad_nv.engine.loading import weights_identity
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.kvcache.groups import CacheGroups
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import ModelConfig, read_config
from tinygrad_nv.models.llama import Llama

if TYPE_CHECKING:
    from tinygrad_nv.dist.group import World
    from tinygrad_nv.engine.executor.followers import Followers
    from tinygrad_nv.models.parallel import Parallel


# by tinygrad's names, which a process can tell another
FLOATS = {each.name: each for each in (dtypes.float32, dtypes.float16, dtypes.bfloat16)}


@dataclass(frozen=True)
class RunnerPlan:
    """Arguments of a model and its runner; `model_runner.py` says what they mean. `quantization` is that of
    the configuration, or what was asked for (engine/loading.py). With `experts` each rank has whole
    experts."""
    directory: Path
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
    quantization: Mapping[str, Any] | None = None
    experts: bool = False

    def config(self) -> ModelConfig:
        """Of the whole model."""
        found = read_config(self.directory)
        return found if self.quantization is None else replace(found, quantization=self.quantization)

    @property
    def tinygrad_dtype(self) -> DType:
        """The dtype of weights."""
        return FLOATS[self.dtype]


@dataclass(frozen=True)
class Part:
    """A rank's part of a model: what it computes, and how layers lie in its pages."""
    world: World
    parallel: Parallel
    config: ModelConfig
    groups: CacheGroups


def part_of(world: World, plan: RunnerPlan) -> Part:
    """This rank's. Ranks of a stage stand one after the other, those of the last stage first: rank 0, which
    answers requests, has the logits. Every rank has to call it."""
    from tinygrad_nv.models import parallel
    whole, tensor, stages = plan.config(), plan.tensor_ranks, plan.stages
    behind, number = divmod(world.rank, tensor)
    stage = stages - 1 - behind
    group = world.group(range(behind * tensor, behind * tensor + tensor))
    pipe = world.group(range(number, world.size, tensor)[::-1]) if stages > 1 else None
    made = parallel.Parallel(group, whole, pipe, world.group() if stages > 1 else None, plan.experts)
    config = parallel.local_config(parallel.stage_config(whole, stage, stages), tensor, plan.experts)
    groups = plan.groups if pipe is None else parallel.stage_groups(plan.groups, made.layers)
    return Part(world, made, config, groups)


def device_of(world: World, device: str, visible: str | None) -> str:
    """This rank's device: of GPUs the one with its number on its host, unless a launcher lets it see one
    alone (`visible` is CUDA_VISIBLE_DEVICES)."""
    kind, _, number = device.partition(":")
    if kind != "CUDA" or world.ranks.local_world_size == 1: return device
    if visible is not None and "," not in visible: return device
    return f"{kind}:{int(number or 0) + world.ranks.local_rank}"


def load_part(part: Part, plan: RunnerPlan, followers: Followers | None = None,
              progress: Callable[[int, int], None] | None = None,
              stage: Callable[[str], None] = lambda name: None) -> ModelRunner:
    """The runner of a rank's part."""
    plan = replace(plan, device=device_of(part.world, plan.device, os.environ.get("CUDA_VISIBLE_DEVICES")))
    model = load_weights(plan, part.config, part.parallel, progress, stage)
    return make_runner(replace(plan, groups=part.groups), model, followers)


def load_weights(plan: RunnerPlan, config: ModelConfig, parallel: Parallel | None,
                 progress: Callable[[int, int], None] | None = None,
                 stage: Callable[[str], None] = lambda name: None) -> Llama:
    """The network of `config`, that of this rank, with its weights."""
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
                       groups=p.groups, verifies=p.verifies, followers=followers,
                       identity=weights_identity(p.directory), **more)
