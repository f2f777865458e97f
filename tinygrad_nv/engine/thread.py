"""`EngineThread`: runs a core in its own thread, for callers in any other thread.

Protocol: `submit(request, sink)` queues a request. After each step, `sink` is called once, from the core's
thread, with the `EngineCoreOutput`s of all requests submitted with it. `abort` ends a request, `finish` one
sequence of it; the sink gets no more outputs of them after the step that is running. These calls return at
once; `call` waits for its task. Their commands run between steps, in the order of the calls.

After `pause(why, abort)` submits raise `why` until `resume`. What runs ends, aborted or when it is done, and
then the pause's future is set; `resume` cancels it. Commands run meanwhile, as they always do.

The thread exits when no work is left, and starts again with the next command. When the core raises, every
request ends with finish reason "error", and `failure` is set: later calls of `submit` raise it. `close` does
the same. A forked process has none of the parent's threads; `submit` raises there.
"""
from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from tinygrad_nv.engine.outputs import EngineCoreOutput
from tinygrad_nv.errors import EngineError, NVError

if TYPE_CHECKING:
    from tinygrad_nv.engine.core import EngineCore, EngineStats
    from tinygrad_nv.engine.scheduling.request import Request

T = TypeVar("T")
Sink = Callable[[list[EngineCoreOutput]], None]


class Engine(Protocol):
    """Engine that requests are submitted to: a core's thread, or several replicas (executor/replicas.py)."""
    @property
    def failure(self) -> NVError | None: ...
    @property
    def refusal(self) -> NVError | None: ...
    @property
    def max_seqs(self) -> int: ...
    def submit(self, request: Request, sink: Sink) -> None: ...
    def abort(self, request: str) -> None: ...
    def finish(self, request: str, index: int, stop_reason: int | str | None) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def stats(self) -> EngineStats: ...
    def fail(self, error: NVError) -> None: ...
    def join(self, timeout_s: float | None = None) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Client:
    """The sink of a request, and its sequences that have not finished."""
    sink: Sink
    unfinished: set[int]


class EngineThread:
    """Runs `core`. No other thread may call the core, except for `stats`."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.failure: NVError | None = None
        self.refusal: NVError | None = None     # of requests, while paused
        # used by the core's thread alone
        self._clients, self._pauses = dict[str, Client](), list[Future[None]]()
        self._lock, self._commands = threading.Lock(), deque[Callable[[], None]]()
        self._arrived = threading.Event()       # a command, since the thread began to run commands
        self._process = os.getpid()
        self._thread: threading.Thread | None = None

    @property
    def max_seqs(self) -> int:
        """Sequences that run at a time."""
        return self.core.config.max_seqs

    def stats(self) -> EngineStats:
        """Current statistics of the core."""
        return self.core.stats()

    def reset_prefix_cache(self) -> None:
        """Forgets what the prefix cache holds."""
        self.call(self.core.reset_prefix_cache)

    def submit(self, request: Request, sink: Sink) -> None:
        """Queues a request. If the core rejects it, the sink gets `EngineCoreOutput`s with the error."""
        self.require_own_process()
        if self.refusal is not None: raise self.refusal
        self._enqueue(partial(self._add, request, sink))
        if self.failure is not None: raise self.failure

    def abort(self, request: str) -> None:
        """Ends a request. Does nothing for an unknown one."""
        self._enqueue(partial(self._abort, request))

    def finish(self, request: str, index: int, stop_reason: int | str | None) -> None:
        """Ends one sequence whose text has met a stop string."""
        self._enqueue(partial(self._finish, request, index, stop_reason))

    def call(self, task: Callable[[], T]) -> T:
        """Runs a task between two steps, and returns its result."""
        done: Future[T] = Future()
        def run() -> None:
            if not done.set_running_or_notify_cancel(): return
            try: done.set_result(task())
            except BaseException as error: done.set_exception(error)
        self.require_own_process()
        self._enqueue(run)
        if self.failure is not None and done.cancel(): raise self.failure
        return done.result()

    def pause(self, why: NVError, abort: bool) -> Future[None]:
        """Later submits raise `why`. Requests end, with finish reason "abort" or when they are done; the
        future is set when none is left."""
        return self.call(partial(self._pause, why, abort))

    def resume(self) -> None:
        """Takes requests again. Pauses that still wait for requests are cancelled."""
        self.refusal = None
        self._enqueue(self._cancel_pauses)

    def close(self) -> None:
        """Ends all requests with an error and waits for the thread. Later submits raise."""
        self._enqueue(self._close)
        self.join()

    def fail(self, error: NVError) -> None:
        """Ends all requests with this error. Later submits raise it."""
        def run() -> None:
            if self.failure is None: raise error
        self._enqueue(run)

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until no work is left."""
        with self._lock: thread = self._thread
        if thread is not None: thread.join(timeout_s)

    def require_own_process(self) -> None:
        """Raises `EngineError` in a process that was forked off."""
        if os.getpid() == self._process: return
        raise EngineError("the model was loaded before this process was forked off, and its threads did "
                          "not come along", "a model of the process's own",
                          'load it after the fork, or start the process by "spawn"')

    def _enqueue(self, command: Callable[[], None]) -> None:
        if os.getpid() != self._process: return     # another thread of the parent may have held the lock
        with self._lock:
            if self.failure is not None: return
            self._commands.append(command)
            self._arrived.set()
            if self._thread is None:
                # a daemon: process exit does not wait for unread texts
                self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self._thread.start()

    # **** in the core's thread ****

    def _run(self) -> None:
        try:
            while self._run_commands():
                if (spare := self.core.spare_s()) and self._arrived.wait(spare): continue
                if chosen := self.core.step(): self._deliver(chosen)
        except BaseException as error:  # any exception must reach the callers, or they wait for ever
            self._fail(error)

    def _run_commands(self) -> bool:
        """Runs the queued commands. Returns whether the core has work."""
        self._arrived.clear()
        while True:
            with self._lock:
                if not self._commands:
                    if self.core.has_unfinished: return True
                    self._thread = None
                    while self._pauses: self._pauses.pop().set_result(None)
                    return False
                command = self._commands[0]
            command()
            self._commands.popleft()    # after the call: `_fail` runs a command that raised once more

    def _close(self) -> None:
        if self.failure is None: raise EngineError("the model is closed", "one that is open", "load it again")

    def _pause(self, why: NVError, abort: bool) -> Future[None]:
        if self.failure is not None: raise self.failure
        self.refusal = why
        if abort:
            for request in list(self._clients): self.core.abort(request)
        self._pauses.append(done := Future[None]())
        return done

    def _cancel_pauses(self) -> None:
        while self._pauses: self._pauses.pop().cancel()

    def _add(self, request: Request, sink: Sink) -> None:
        try:
            if (error := self.failure or self.refusal) is not None: raise error
            self.core.add(request)
        except NVError as error:
            sink([EngineCoreOutput(request.id, index, (), finish_reason="error", error=error)
                  for index in range(request.params.n)])
            return
        self._clients[request.id] = Client(sink, set(range(request.params.n)))

    def _abort(self, request: str) -> None:
        if self._clients.pop(request, None) is not None: self.core.abort(request)

    def _finish(self, request: str, index: int, stop_reason: int | str | None) -> None:
        if (client := self._clients.get(request)) is None or index not in client.unfinished: return
        self.core.finish(request, index, stop_reason)
        self._end(request, client, index)

    def _end(self, request: str, client: Client, index: int) -> None:
        client.unfinished.discard(index)
        if not client.unfinished: del self._clients[request]

    def _deliver(self, chosen: list[EngineCoreOutput]) -> None:
        """Calls each sink once, so that a caller's thread wakes once a step."""
        by_sink: dict[Sink, list[EngineCoreOutput]] = {}
        for each in chosen:
            client = self._clients.get(each.request)
            if client is None or each.index not in client.unfinished: continue
            by_sink.setdefault(client.sink, []).append(each)
            if each.finish_reason is not None: self._end(each.request, client, each.index)
        for sink, part in by_sink.items(): sink(part)

    def _fail(self, error: BaseException) -> None:
        failure = error if isinstance(error, NVError) else EngineError(
            f"the engine stopped: {type(error).__name__}: {error}", "",
            "load the model again; if it happens again, it is a bug: report it with the traceback")
        if failure is not error: failure.__cause__ = error
        with self._lock:
            self.failure, self._thread = failure, None
            commands, self._commands = self._commands, deque()
        by_sink: dict[Sink, list[EngineCoreOutput]] = {}
        for request, client in self._clients.items():
            by_sink.setdefault(client.sink, []).extend(
                EngineCoreOutput(request, index, (), finish_reason="error", error=failure)
                for index in client.unfinished)
        self._clients.clear()
        for sink, part in by_sink.items(): sink(part)
        while self._pauses: self._pauses.pop().set_exception(failure)
        for command in commands: command()  # requests queued meanwhile get the error, too
