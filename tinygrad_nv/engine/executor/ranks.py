"""The ranks of a model, as rank 0 has them: opened, loaded, closed.

Protocol: `ParallelRanks.open(options, config)` raises for a model or options that several ranks cannot have,
before it starts any. Other ranks of a launcher that run the same program do as rank 0 does from here on, and
end with it.
"""
from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tinygrad_nv.dist import group as dist
from tinygrad_nv.dist.launcher import LocalRanks
from tinygrad_nv.engine.engine_plan import EnginePlan
from tinygrad_nv.engine.executor.connections import connect, open_ranks
from tinygrad_nv.engine.executor.follower import follow
from tinygrad_nv.engine.executor.followers import Followers
from tinygrad_nv.engine.executor.plan import PageBudget, RunnerPlan, load_rank
from tinygrad_nv.engine.executor.replicas import RemoteEngine, Replicas
from tinygrad_nv.engine.load_options import LoadOptions
from tinygrad_nv.engine.thread import EngineThread
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.errors import ConfigError, DistError
from tinygrad_nv.models.parallel import local_config, stage_config

if TYPE_CHECKING:
    from tinygrad_nv.models.config import ModelConfig

Progress = Callable[[int, int], None]
END_S = 10.0        # for ranks to end when they are told to
FAILED_END_S = 1.0  # for those that may wait for one that has failed


@dataclass
class ParallelRanks:
    """All ranks: `followers` of rank 0's own replica, and the engines of the other `replicas`. `local` are
    those that were started here."""
    world: dist.World
    followers: Followers
    replicas: Sequence[RemoteEngine]
    local: LocalRanks | None
    engines: Replicas | None = None
    closed: threading.Event = field(default_factory=threading.Event)

    @staticmethod
    def open(options: LoadOptions, config: ModelConfig) -> ParallelRanks:
        """Finds or starts the other ranks. Raises `ConfigError`, `ModelError`, `DistError`."""
        if options.lora is not None:
            raise ConfigError(f"enable_lora is True, and {options.world_size} ranks have the model",
                              "one of them", "merge the adapter into the weights")
        stages = options.pipeline_parallel_size
        # raises for a model that cannot be cut
        local_config(stage_config(config, stages - 1, stages), options.tensor_parallel_size,
                     options.enable_expert_parallel)
        world, local = open_ranks(options.world_size, options.ranks)
        if world.rank: raise SystemExit(follow(world, options.ranks))
        try: found = connect(world, options.ranks)
        except BaseException:
            if local is not None: local.close(0)
            dist.close()
            raise
        followers = Followers(found.followers, world.interrupt)
        world.on_end(followers.lose)
        replicas = [RemoteEngine(rank, each) for rank, each in found.leaders.items()]
        made = ParallelRanks(world, followers, replicas, local)
        # a program that ends without close(): else the others, and MPI, would wait for each other
        atexit.register(made.close)
        return made

    @contextmanager
    def together(self, name: str, *arguments: Any) -> Iterator[list[Any]]:
        """Has the other replicas do something while this one does. What they answer is in the list at the
        end. Raises the first error of any rank."""
        asked, answers = [each.ask(name, *arguments) for each in self.replicas], list[Any]()
        for each in asked: each.add_done_callback(self._fail_on_error)
        yield answers
        answers += [each.result() for each in asked]

    def _fail_on_error(self, done: Future[Any]) -> None:
        if (error := done.exception()) is not None: self.followers.fail(error)

    def check_ranks(self, progress: Progress) -> Progress:
        """Returns `progress`, which raises as soon as a rank has failed."""
        def check(done: int, total: int) -> None:
            self.followers.check()
            progress(done, total)
        return check

    def pages(self, own: Callable[[], int], plan: RunnerPlan, budget: PageBudget, how: EnginePlan) -> int:
        """Pages that all ranks have room for; `own` says how many this one has."""
        with self.together("pages", plan, budget, how.draft) as others:
            found, followers = self.followers.together(own, "pages", plan, budget)
        return min([found, *followers, *others])

    def load(self, plan: RunnerPlan, how: EnginePlan, progress: Progress | None,
             stage: Callable[[str], None]) -> ModelRunner:
        """Loads the model on all ranks: the runner of this one."""
        def own() -> ModelRunner:
            return load_rank(self.world, plan, self.followers if plan.ranks > 1 else None,
                             self.check_ranks(progress or (lambda done, total: None)), stage)
        with self.together("open", plan, how): return self.followers.together(own, "open", plan)[0]

    def engine(self, own: EngineThread) -> EngineThread | Replicas:
        """Returns the engine that requests are submitted to, over that of rank 0. Requests fail when ranks
        have parted; their callers have some time to end the process."""
        if self.replicas: self.engines = Replicas(own, self.replicas)
        made = self.engines or own

        def end(why: DistError) -> None:
            made.fail(why)
            self.closed.wait()
        self.world.on_end(end)
        return made

    @property
    def num_replicas(self) -> int:
        """With that of rank 0."""
        return 1 + len(self.replicas)

    def refresh_stats(self) -> None:
        """Has statistics and `compilations` of the other replicas be those of now; waits a second at most."""
        if self.engines is not None: self.engines.refresh_stats()

    def compilations(self) -> int:
        """Returns the compilations of the other replicas, since they were ready, as of the last
        `refresh_stats`."""
        return 0 if self.engines is None else self.engines.compilations()

    def tell(self, name: str) -> None:
        """Has the other replicas do something, and waits."""
        for each in [each.ask(name) for each in self.replicas]: each.result()

    def close(self) -> None:
        """Ends the other ranks."""
        if self.closed.is_set(): return
        self.closed.set()
        atexit.unregister(self.close)
        # one that has to be ended is not lost
        if self.world.watchdog is not None: self.world.watchdog.close()
        for each in self.replicas: each.close()
        self.followers.close()
        # followers end when all ranks have closed each other's memory
        if self.followers.lost is None: self.world.leave_peers()
        if self.local is not None: self.local.close(END_S if self.followers.lost is None else FAILED_END_S)
        self.world.follow = False
        dist.close()
