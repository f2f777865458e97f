"""`EngineThread`: a core at work in a thread of its own, for callers in any other.

Protocol: `submit(request, sink)` brings a request in; each step hands `sink` the `Chosen`s of all requests
that came with it, in one call, from the core's thread. `abort` and `finish` stop requests or one sequence of
one: nothing of these reaches the sink after the step that is under way. The calls return at once, and what
they ask is done between steps, in their order.

The thread is there while there is work. When the core raises, every request ends with finish reason "error"
and the words of `failure`, and later calls of `submit` raise it; so it is after `close`. A process that is
forked off has none of the threads, and `submit` says so there.
"""
from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tinygrad_nv.engine.outputs import Chosen
from tinygrad_nv.errors import EngineError, NVError

if TYPE_CHECKING:
    from tinygrad_nv.engine.core import EngineCore
    from tinygrad_nv.engine.scheduling.request import Request

Sink = Callable[[list[Chosen]], None]


@dataclass(frozen=True)
class Client:
    """Who waits for a request's tokens, and which of its sequences go on."""
    sink: Sink
    going: set[int]


class EngineThread:
    """Runs `core`; nobody else may call it, but for `stats`."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.failure: NVError | None = None
        self._clients: dict[str, Client] = {}  # for the core's thread alone
        self._lock, self._commands = threading.Lock(), deque[Callable[[], None]]()
        self._process = os.getpid()
        self._thread: threading.Thread | None = None

    def submit(self, request: Request, sink: Sink) -> None:
        """Brings a request in. What the core has against it comes as `Chosen`s with an error."""
        if os.getpid() != self._process:
            raise EngineError("the model was loaded before this process was forked off, and its threads did "
                              "not come along", "a model of the process's own",
                              'load it after the fork, or start the process by "spawn"')
        self._tell(partial(self._add, request, sink))
        if self.failure is not None: raise self.failure

    def abort(self, request: str) -> None:
        """Ends a request; one that is not there is none."""
        self._tell(partial(self._abort, request))

    def finish(self, request: str, index: int, stop_reason: int | str | None) -> None:
        """Ends one sequence, whose text has met a stop string."""
        self._tell(partial(self._finish, request, index, stop_reason))

    def close(self) -> None:
        """Ends what runs, with an error, and waits for that. Nothing can be submitted after it."""
        self._tell(self._close)
        self.join()

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until there is no work."""
        with self._lock: thread = self._thread
        if thread is not None: thread.join(timeout_s)

    def _tell(self, command: Callable[[], None]) -> None:
        if os.getpid() != self._process: return     # another thread may have had the lock
        with self._lock:
            if self.failure is not None: return
            self._commands.append(command)
            if self._thread is None:
                # a daemon: a process that ends does not wait for texts nobody will read
                self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self._thread.start()

    # **** in the core's thread ****

    def _run(self) -> None:
        try:
            while self._obey():
                if chosen := self.core.step(): self._deliver(chosen)
        except BaseException as error:  # whatever it is, who waits must not wait for ever
            self._fail(error)

    def _obey(self) -> bool:
        """Does what was asked; whether there is work to go on with."""
        while True:
            with self._lock:
                if not self._commands:
                    if not self.core.unfinished: self._thread = None
                    return self._thread is not None
                command = self._commands[0]
            command()
            self._commands.popleft()    # only now: what raises is told by `_fail`, as all behind it

    def _close(self) -> None:
        if self.failure is None: raise EngineError("the model is closed", "one that is open", "load it again")

    def _add(self, request: Request, sink: Sink) -> None:
        try:
            if self.failure is not None: raise self.failure
            self.core.add(request)
        except NVError as error:
            sink([Chosen(request.id, index, (), finish_reason="error", error=error)
                  for index in range(request.params.n)])
            return
        self._clients[request.id] = Client(sink, set(range(request.params.n)))

    def _abort(self, request: str) -> None:
        if self._clients.pop(request, None) is not None: self.core.abort(request)

    def _finish(self, request: str, index: int, stop_reason: int | str | None) -> None:
        if (client := self._clients.get(request)) is None or index not in client.going: return
        self.core.finish(request, index, stop_reason)
        self._end(request, client, index)

    def _end(self, request: str, client: Client, index: int) -> None:
        client.going.discard(index)
        if not client.going: del self._clients[request]

    def _deliver(self, chosen: list[Chosen]) -> None:
        """One call of each sink, so that a caller's thread is woken once a step."""
        by_sink: dict[Sink, list[Chosen]] = {}
        for each in chosen:
            client = self._clients.get(each.request)
            if client is None or each.index not in client.going: continue
            by_sink.setdefault(client.sink, []).append(each)
            if each.finish_reason is not None: self._end(each.request, client, each.index)
        for sink, part in by_sink.items(): sink(part)

    def _fail(self, error: BaseException) -> None:
        words = error if isinstance(error, NVError) else EngineError(
            f"the engine stopped: {type(error).__name__}: {error}", "steps that end",
            "load the model again; if it happens again, it is a bug: report it with the traceback")
        if words is not error: words.__cause__ = error
        with self._lock:
            self.failure, self._thread = words, None
            commands, self._commands = self._commands, deque()
        by_sink: dict[Sink, list[Chosen]] = {}
        for request, client in self._clients.items():
            by_sink.setdefault(client.sink, []).extend(
                Chosen(request, index, (), finish_reason="error", error=words) for index in client.going)
        self._clients.clear()
        for sink, part in by_sink.items(): sink(part)
        for command in commands: command()  # requests that came meanwhile are told, too
