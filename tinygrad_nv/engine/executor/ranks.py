"""The ranks of a model, as rank 0 has them: opened, loaded, closed.

Protocol: `ParallelRanks.open(options, config)` raises for a model or options that several ranks cannot have,
before it starts any. Other ranks of a launcher that run the same program do as rank 0 does from here on, and
end with it.
"""
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tinygrad.dtype import DType

from tinygrad_nv.dist import group as dist
from tinygrad_nv.engine.executor.follower import follow
from tinygrad_nv.engine.executor.followers import Followers, open_ranks
from tinygrad_nv.engine.executor.plan import RunnerPlan, load_weights, make_runner
from tinygrad_nv.engine.load_options import LoadOptions
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.errors import ConfigError
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.parallel import Parallel, local_config
from tinygrad_nv.models.shares import own_nbytes

if TYPE_CHECKING:
    from tinygrad_nv.dist.group import Group


@dataclass
class ParallelRanks:
    """All ranks. `config` is that of a rank's part of the model, `whole` the model's; with `experts` each has
    some experts whole."""
    world: dist.World
    followers: Followers
    config: ModelConfig
    whole: ModelConfig
    experts: bool = False

    @staticmethod
    def open(options: LoadOptions, config: ModelConfig) -> ParallelRanks:
        """Finds or starts the other ranks. Raises `ConfigError`, `ModelError`, `DistError`."""
        size = options.tensor_parallel_size
        if options.lora is not None:
            raise ConfigError(f"enable_lora is True, and tensor_parallel_size {size}", "one of them",
                              "merge the adapter into the weights")
        own = local_config(config, size, options.enable_expert_parallel)
        world, followers = open_ranks(size)
        if world.rank: raise SystemExit(follow(world))
        world.on_lost(followers.lose)
        return ParallelRanks(world, followers, own, config, options.enable_expert_parallel)

    @property
    def parallel(self) -> Parallel:
        """What this rank has of the model."""
        return Parallel(self.world.group(), self.whole, self.experts)

    def weight_bytes(self, dtype: DType, device: str, directory: Path) -> int:
        """Bytes of this rank's weights: no other rank has more. The group is made when all ranks load; of it
        only rank and size are asked for, which the world has, too."""
        place = Parallel(cast("Group", self.world), self.whole, self.experts)
        return own_nbytes(Llama(self.config, dtype, device, parallel=place), directory)

    def load(self, plan: RunnerPlan, progress: Callable[[int, int], None] | None,
             stage: Callable[[str], None]) -> ModelRunner:
        """Loads the model on all ranks: the runner of this one."""
        with ThreadPoolExecutor(1) as waits:
            others = waits.submit(self.followers.ask, "open", plan)

            def counted(done: int, total: int) -> None:
                self.followers.check()
                if progress is not None: progress(done, total)
            model = load_weights(plan, self.config, self.parallel, counted, stage)
            others.result()
        return make_runner(plan, model, self.followers)

    def close(self) -> None:
        """Ends the other ranks."""
        self.followers.close()
        dist.close()
