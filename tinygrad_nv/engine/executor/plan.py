"""What a rank loads: its part of a model, and the pages that it has room for.

Protocol: rank 0 makes a `RunnerPlan` of what it was asked for. `load(plan, parallel, …)` makes the same model
runner on every rank, of another part of the weights.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygrad import dtypes
from tinygrad.dtype import DType

from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.kvcache.groups import CacheGroups
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import ModelConfig, read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.tile.gemm.spec import FLOAT16S

if TYPE_CHECKING:
    from tinygrad_nv.engine.executor.followers import Followers
    from tinygrad_nv.models.parallel import Parallel


@dataclass(frozen=True)
class RunnerPlan:
    """Arguments of a model and its runner; `model_runner.py` says what they mean. `quantization` is what the
    configuration does not say of itself (engine/loading.py). With `experts` each rank has whole experts."""
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
    quantization: Mapping[str, Any] | None = None
    experts: bool = False

    def config(self) -> ModelConfig:
        """Of the whole model."""
        found = read_config(self.directory)
        return found if self.quantization is None else replace(found, quantization=self.quantization)

    @property
    def tinygrad_dtype(self) -> DType:
        """The dtype of weights."""
        return {each.name: each for each in (dtypes.float32, *FLOAT16S)}[self.dtype]


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
                       groups=p.groups, verifies=p.verifies, followers=followers, **more)
