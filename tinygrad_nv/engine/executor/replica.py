"""The rank that leads a replica, other than rank 0: an engine of its own, for requests that rank 0 sends.

Protocol: rank 0 sends (number, name, sequences, arguments): the name is one of `COMMANDS`, the arguments are
pickled by themselves, and `sequences` are the id and the number of sequences of a new request. A request that
cannot be unpickled here, as classes of the user's program cannot, ends with an error, and nothing else does.

A command with a number is answered with (number, whether it went well, result or error). Outputs of requests
go back once a step as (0, failure, outputs), each a tuple of `EngineCoreOutput`'s fields; a failure is that
of the whole engine. Matchers of structured output are made here, in threads, as they cannot be sent.
"""
from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from typing import Any

from tinygrad_nv.dist import group as dist
from tinygrad_nv.engine.core import EngineStats
from tinygrad_nv.engine.engine_plan import EnginePlan, OpenEngine
from tinygrad_nv.engine.executor.connections import Connections
from tinygrad_nv.engine.executor.followers import Followers, error_text
from tinygrad_nv.engine.executor.plan import (
    PageBudget,
    RunnerPlan,
    load_rank,
    on_rank,
    pages_of,
    weight_bytes_of,
)
from tinygrad_nv.engine.loading import optional_tokenizer
from tinygrad_nv.engine.outputs import EngineCoreOutput
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.engine.structured_output.matchers import Matchers
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.engine.thread import EngineThread
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.errors import DistError, EngineError, NVError, RequestError, TokenizerError
from tinygrad_nv.runtime.programs import Compilations

GRAMMARS = 4    # that are compiled at a time
# a tuple takes a third of the time of a dataclass to send
fields_of = attrgetter(*EngineCoreOutput.__slots__)


class Replica:
    """See above. A replica of several ranks has followers, as that of rank 0 has."""

    def __init__(self, world: dist.World, found: Connections) -> None:
        assert found.up is not None, "rank 0 leads itself"
        self.world, self.front = world, found.up
        self.followers = Followers(found.followers, world.interrupt)
        self.runner: ModelRunner | None = None
        self.opened: OpenEngine | None = None
        self.compilations = Compilations()
        self._matchers: Matchers | None = None
        self._making, self._pool = set[str](), ThreadPoolExecutor(GRAMMARS, "nv-grammar")
        self._lock, self._sending = threading.Lock(), threading.Lock()

    def serve(self) -> int:
        """Does what rank 0 says until it ends: the status to exit with."""
        while True:
            try: number, name, sequences, arguments = self.front.recv()
            except (EOFError, OSError): return 1
            if name == "close":
                self.close()
                self.world.leave_peers()
                return 0
            try: answer = True, self._do(name, sequences, arguments)
            except NVError as error: answer = False, error
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                answer = False, DistError(error_text(error))
            if number: self._send(number, *answer)
            elif not answer[0]: raise answer[1]

    def _do(self, name: str, sequences: tuple[str, int] | None, packed: bytes) -> Any:
        try: arguments = ForkingPickler.loads(packed)
        except Exception as error:
            if sequences is None: raise
            return self._refuse(*sequences, RequestError(
                f"rank {self.world.rank} cannot read the request: {error_text(error)}",
                "parameters of types that Python or this package has, which every rank can import",
                "pass str(value) for a value of a type of your own"))
        return COMMANDS[name](self, *arguments)

    def _send(self, *message: Any) -> None:
        # without rank 0 there is nothing to say: `serve` ends
        with self._sending, contextlib.suppress(OSError): self.front.send(message)

    # **** the model ****

    def pages(self, plan: RunnerPlan, budget: PageBudget, *draft: Any) -> int:
        """Pages that all ranks of the replica have room for."""
        def own() -> int:
            here = on_rank(self.world, plan)
            return pages_of(self.world.rank, here, budget, weight_bytes_of(self.world.rank, here), *draft)
        found, others = self.followers.together(own, "pages", plan, budget)
        return min([found, *others])

    def open(self, plan: RunnerPlan, how: EnginePlan) -> None:
        """Loads the model, and opens the engine."""
        followers = self.followers if plan.ranks > 1 else None
        def own() -> ModelRunner: return load_rank(self.world, plan, followers)
        self.runner = runner = self.followers.together(own, "open", plan)[0]
        self.opened = how.open(plan, runner)
        self.engine = EngineThread(self.opened.core)
        tokenizer, why = optional_tokenizer(how.tokenizer)

        def require_tokenizer() -> Tokenizer:
            if tokenizer is None: raise why or TokenizerError("no tokenizer")
            return tokenizer
        self._matchers = Matchers(require_tokenizer, plan.config.vocab_size, how.config.eos)

    @property
    def runners(self) -> Sequence[ModelRunner]:
        """Runner of the model, and that of the draft model, if there is one."""
        assert self.runner is not None
        draft = None if self.opened is None or self.opened.draft_model is None else self.opened.draft_model
        return [self.runner, *([draft.runner] if draft and isinstance(draft.runner, ModelRunner) else ())]

    def warm_up(self) -> None:
        """Captures what every load needs."""
        for each in self.runners: each.warm_up(defer=True)

    def ready(self) -> None:
        """Counts compilations from now on."""
        self.compilations = Compilations()

    def follow(self) -> None:
        """Prepares what the warm-up has left."""
        for each in self.runners: each.follow(lambda done, total: None)

    def close(self) -> None:
        """Ends the engine, and the other ranks."""
        if self.opened is not None:
            self.engine.close()
            if self.opened.draft_model is not None: self.opened.draft_model.close()
        self._pool.shutdown(cancel_futures=True)
        if self.runner is not None: self.runner.close()
        if self._matchers is not None: self._matchers.close()
        self.followers.close()
        self.opened = self.runner = None

    # **** requests ****

    def submit(self, request: Request) -> None:
        """Queues a request."""
        request = replace(request, arrival_s=time.monotonic())      # hosts differ in their clocks
        if not request.params.needs_masks: return self._submit(request)
        with self._lock: self._making.add(request.id)
        self._pool.submit(self._make_matchers, request)

    def _submit(self, request: Request) -> None:
        try: self.engine.submit(request, self._deliver)
        except NVError as error: self._refuse(request.id, request.params.n, error)

    def _make_matchers(self, request: Request) -> None:
        assert self._matchers is not None
        try: made = replace(request, matchers=self._matchers.of(request.params))
        except Exception as error:
            with self._lock: self._making.discard(request.id)
            return self._refuse(request.id, request.params.n,
                                error if isinstance(error, NVError) else EngineError(error_text(error)))
        with self._lock:
            if request.id not in self._making: return   # aborted
            self._making.discard(request.id)
            self._submit(made)

    def _refuse(self, request: str, n: int, error: NVError) -> None:
        self._deliver([EngineCoreOutput(request, index, (), finish_reason="error", error=error)
                       for index in range(n)])

    def _deliver(self, outputs: list[EngineCoreOutput]) -> None:
        self._send(0, self.engine.failure, [*map(fields_of, outputs)])

    def abort(self, request: str) -> None:
        """Ends a request."""
        with self._lock:
            if request in self._making: return self._making.discard(request)
        self.engine.abort(request)

    def finish(self, request: str, index: int, stop_reason: int | str | None) -> None:
        """Ends one sequence of it."""
        self.engine.finish(request, index, stop_reason)

    def reset_prefix_cache(self) -> None:
        """Forgets what the prefix cache holds."""
        self.engine.reset_prefix_cache()

    def stats(self) -> tuple[EngineStats, int]:
        """Statistics of the engine, and compilations since it was ready."""
        return self.engine.stats(), self.compilations.since()


COMMANDS: dict[str, Callable[..., Any]] = {each.__name__: each for each in (
    Replica.pages, Replica.open, Replica.warm_up, Replica.ready, Replica.follow, Replica.submit,
    Replica.abort, Replica.finish, Replica.reset_prefix_cache, Replica.stats)}
