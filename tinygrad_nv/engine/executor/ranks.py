"""The ranks of a model, as rank 0 has them: opened, loaded, closed.

Protocol: `ParallelRanks.open(options, config)` raises for a model or options that several ranks cannot have,
before it starts any. Other ranks of a launcher that run the same program do as rank 0 does from here on, and
end with it.
"""
from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tinygrad.dtype import DType

from tinygrad_nv.dist import group as dist
from tinygrad_nv.engine.executor.follower import follow
from tinygrad_nv.engine.executor.followers import Followers, open_ranks
from tinygrad_nv.engine.executor.plan import RunnerPlan, load_part, part_of
from tinygrad_nv.engine.load_options import LoadOptions
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.errors import ConfigError, DistError
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.parallel import Parallel, local_config, stage_config
from tinygrad_nv.models.weights import own_nbytes

if TYPE_CHECKING:
    from tinygrad_nv.dist.group import Group


@dataclass(frozen=True)
class Place:
    """A rank of a group that is not made yet."""
    rank: int
    size: int


@dataclass
class ParallelRanks:
    """All ranks. `config` is that of this rank's part of the model, `whole` the model's."""
    world: dist.World
    followers: Followers
    config: ModelConfig
    whole: ModelConfig
    options: LoadOptions
    closed: threading.Event = field(default_factory=threading.Event)

    @staticmethod
    def open(options: LoadOptions, config: ModelConfig) -> ParallelRanks:
        """Finds or starts the other ranks. Raises `ConfigError`, `ModelError`, `DistError`."""
        if options.lora is not None:
            raise ConfigError(f"enable_lora is True, and {options.ranks} ranks have the model", "one of them",
                              "merge the adapter into the weights")
        stages = options.pipeline_parallel_size
        last = stage_config(config, stages - 1, stages)     # rank 0 has the logits
        own = local_config(last, options.tensor_parallel_size, options.enable_expert_parallel)
        world, followers = open_ranks(options.ranks)
        if world.rank: raise SystemExit(follow(world))
        world.on_end(followers.lose)
        made = ParallelRanks(world, followers, own, config, options)
        # a program that ends without close(): else the others, and MPI, would wait for each other
        atexit.register(made.close)
        return made

    def weight_bytes(self, dtype: DType, device: str, directory: Path) -> int:
        """Bytes of this rank's weights, which are those of the last stage. Groups are made when all ranks
        load; here only rank and size are asked for."""
        o, stages = self.options, self.options.pipeline_parallel_size
        last = Place(stages - 1, stages)
        place = Parallel(cast("Group", Place(0, o.tensor_parallel_size)), self.whole, cast("Group", last),
                         experts=o.enable_expert_parallel)
        return own_nbytes(Llama(self.config, dtype, device, parallel=place), directory)

    def load(self, plan: RunnerPlan, progress: Callable[[int, int], None] | None,
             stage: Callable[[str], None]) -> ModelRunner:
        """Loads the model on all ranks: the runner of this one."""
        with ThreadPoolExecutor(1) as waits:
            others = waits.submit(self.followers.ask, "open", plan)

            def counted(done: int, total: int) -> None:
                self.followers.check()
                if progress is not None: progress(done, total)
            made = load_part(part_of(self.world, plan), plan, self.followers, counted, stage)
            others.result()
        return made

    def on_end(self, fail: Callable[[DistError], None]) -> None:
        """Has requests fail when ranks have parted; their callers have some time to end the process."""
        def end(why: DistError) -> None:
            fail(why)
            self.closed.wait()
        self.world.on_end(end)

    def close(self) -> None:
        """Ends the other ranks."""
        if self.closed.is_set(): return
        self.closed.set()
        atexit.unregister(self.close)
        # one that has to be ended is not lost
        if self.world.watchdog is not None: self.world.watchdog.close()
        self.followers.close()
        dist.close()
