"""Several replicas of a model, as rank 0 has them: requests go to the one with the least work.

Protocol: `Replicas(own, others)` is what requests are submitted to (thread.py), over the engine of rank 0 and
`RemoteEngine`s of the ranks that lead the others (replica.py). A request goes, with all its sequences, to the
replica with the smallest load, in turn where several have it: 4 for each sequence that waits for its first
token, and 1 for each that has one (vLLM's weights). Rank 0 counts this itself, by the outputs that come.

Any thread may call it, and no call waits for a replica but `refresh_stats` and `reset_prefix_cache`: `stats`
shows what each replica last answered, and a replica is asked again only when it has answered.
"""
from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any

from tinygrad_nv.engine.core import EngineStats
from tinygrad_nv.engine.executor.followers import error_text, of_rank, rank_ended
from tinygrad_nv.engine.outputs import EngineCoreOutput
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.engine.thread import EngineThread, Sink
from tinygrad_nv.errors import EngineError, NVError, RequestError

WAITING, RUNNING = 4, 1     # load of a sequence
STATS_S = 1.0               # that `refresh_stats` waits for answers: those before are shown then
SEND_TIMEOUT_S = 1.0        # that a message may take until it is sent
Answer = tuple[int, Any, Any]
Message = tuple[int, str, tuple[str, int] | None, bytes]    # number, name, sequences, arguments: replica.py
Stats = tuple[EngineStats, int]     # and compilations since the replica was ready


class RemoteEngine:
    """The engine that rank `rank` leads. Messages are sent and received in threads."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank, self._connection = rank, connection
        self.failure: NVError | None = None
        self.deliver: Sink = lambda outputs: None
        self._numbers, self._answers = itertools.count(1), dict[int, Future[Any]]()
        self._outbox = SimpleQueue[Message | None]()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._stats_lock = threading.Lock()
        self._stats: Stats | None = None
        self._asked: Future[Stats] | None = None
        reader, self._writer = (threading.Thread(target=each, name=f"replica of rank {rank}", daemon=True)
                                for each in (self._read, self._write))
        reader.start()
        self._writer.start()

    def ask(self, name: str, *arguments: Any) -> Future[Any]:
        """Has the replica do something: what it answers."""
        answer, message = Future[Any](), (next(self._numbers), name, None, _pickle(*arguments))
        with self._lock:
            if self.failure is None:
                self._answers[message[0]] = answer
                self._outbox.put(message)
                return answer
        answer.set_exception(self.failure)
        return answer

    def ask_stats(self) -> Future[Stats]:
        """Asks for statistics, unless the question before has no answer yet: what `stats` is then."""
        with self._stats_lock:
            self._keep_stats()
            if self._asked is None or self._asked.done(): self._asked = self.ask("stats")
            return self._asked

    @property
    def stats(self) -> Stats:
        """Statistics that it last answered."""
        with self._stats_lock: self._keep_stats()
        assert self._stats is not None, "ask_stats() comes first"
        return self._stats

    def _keep_stats(self) -> None:
        if self._asked is not None and self._asked.done() and self._asked.exception() is None:
            self._stats = self._asked.result()

    def submit(self, request: Request) -> None:
        """Queues a request. Outputs go to `deliver`, as those of all requests do. Raises `RequestError` for
        one that cannot be sent."""
        if self.failure is not None: raise self.failure
        try: packed = _pickle(replace(request, matchers=(), text=None))
        except Exception as error:
            raise RequestError(f"a request cannot be sent to rank {self.rank}: {error_text(error)}",
                               "parameters that Python can pickle",
                               "pass plain values, or load the model without data_parallel_size") from error
        self._outbox.put((0, "submit", (request.id, request.params.n), packed))

    def abort(self, request: str) -> None:
        """Ends a request."""
        self._outbox.put((0, "abort", None, _pickle(request)))

    def finish(self, request: str, index: int, stop_reason: int | str | None) -> None:
        """Ends one sequence of it."""
        self._outbox.put((0, "finish", None, _pickle(request, index, stop_reason)))

    def fail(self, error: NVError) -> None:
        """Has what waits for the replica, and later calls, raise this."""
        with self._lock:
            self.failure = self.failure or error
            answers, self._answers = self._answers, {}
        for each in answers.values(): each.set_exception(self.failure)
        self.deliver([])    # which looks whether it has failed

    def close(self) -> None:
        """Ends the replica. Returns when it was told, unless it takes nothing any more."""
        self._closed.set()
        self._outbox.put((0, "close", None, b""))
        self._outbox.put(None)
        self._writer.join(SEND_TIMEOUT_S)

    # **** threads ****

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            # the reader finds that the replica is gone
            with contextlib.suppress(OSError): self._connection.send(message)

    def _read(self) -> None:
        try:
            while True:
                message: Answer = self._connection.recv()
                if message[0]: self._take_answer(*message)
                else: self._on_outputs(*message[1:])
        except (EOFError, OSError):
            if self._closed.is_set(): self._connection.close()
            else: self.fail(rank_ended(self.rank))
        except BaseException as error:      # callers would wait for ever
            self.fail(of_rank(self.rank, EngineError(f"what it sent cannot be read: {error_text(error)}")))

    def _on_outputs(self, failure: NVError | None, outputs: list[tuple[Any, ...]]) -> None:
        self.deliver([EngineCoreOutput(*each) for each in outputs])
        if failure is not None: self.fail(of_rank(self.rank, failure))

    def _take_answer(self, number: int, fine: bool, answer: Any) -> None:
        with self._lock: waits = self._answers.pop(number, None)
        if waits is None: return
        if fine: waits.set_result(answer)
        else: waits.set_exception(of_rank(self.rank, answer))


def _pickle(*arguments: Any) -> bytes: return bytes(ForkingPickler.dumps(arguments))


@dataclass(eq=False)
class Client:
    """A request: the sink of its outputs, its replica, the sequences that have not finished, and of these
    those that have no token yet."""
    name: str
    sink: Sink
    replica: int
    unfinished: set[int]
    waiting: set[int]

    @property
    def load(self) -> int:
        """Load of its replica."""
        return WAITING * len(self.waiting) + RUNNING * (len(self.unfinished) - len(self.waiting))


class Replicas:
    """See above. `own` is the engine of rank 0, `others` those of ranks that lead other replicas."""

    def __init__(self, own: EngineThread, others: Sequence[RemoteEngine]) -> None:
        self.own, self.others = own, others
        self.engines: list[EngineThread | RemoteEngine] = [own, *others]
        self.refusal: NVError | None = None
        self._sink = partial(self._deliver, 0)
        for replica, each in enumerate(others, 1): each.deliver = partial(self._deliver, replica)
        self._clients, self._names = dict[str, Client](), dict[str, str]()    # by number, and that of a name
        self._numbers, self._loads, self._turn = itertools.count(), [0] * len(self.engines), 0
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        for asked in [each.ask_stats() for each in others]: asked.result()

    @property
    def failure(self) -> NVError | None:
        """Failure of the first replica that has failed: without it requests are not answered any more."""
        return next((each.failure for each in self.engines if each.failure is not None), None)

    @property
    def max_seqs(self) -> int:
        """Sequences that run at a time, in all replicas."""
        return len(self.engines) * self.own.max_seqs

    def submit(self, request: Request, sink: Sink) -> None:
        """Queues a request. If the core rejects it, the sink gets `EngineCoreOutput`s with the error."""
        self.own.require_own_process()
        if (error := self.failure) is not None: raise error
        with self._lock:
            if request.id in self._names:
                raise RequestError(f"request {request.id!r} is running", "an id of its own", "change the id")
            replica, every = self._least(), range(request.params.n)
            # of a name that is used again, outputs of before may still come
            number = str(next(self._numbers))
            request, name = replace(request, id=number), request.id
            if replica: self.others[replica - 1].submit(request)
            else: self.own.submit(request, self._sink)
            client = Client(name, sink, replica, set(every), set(every))
            self._clients[number], self._names[name] = client, number
            self._loads[replica] += client.load

    def _least(self) -> int:
        count = len(self.engines)
        chosen = min(range(count), key=lambda each: (self._loads[each], (each - self._turn) % count))
        self._turn = (chosen + 1) % count
        return chosen

    def abort(self, request: str) -> None:
        """Ends a request. Does nothing for an unknown one."""
        with self._lock:
            if (number := self._names.get(request)) is None: return
            client = self._forget(number)
            self.engines[client.replica].abort(number)

    def finish(self, request: str, index: int, stop_reason: int | str | None) -> None:
        """Ends one sequence whose text has met a stop string."""
        with self._lock:
            if (number := self._names.get(request)) is None: return
            client = self._clients[number]
            if index not in client.unfinished: return
            self.engines[client.replica].finish(number, index, stop_reason)
            self._end_sequence(number, client, index)

    def reset_prefix_cache(self) -> None:
        """Forgets what all prefix caches hold."""
        others = [each.ask("reset_prefix_cache") for each in self.others]
        self.own.reset_prefix_cache()
        for each in others: each.result()

    def refresh_stats(self) -> None:
        """Asks the other replicas for statistics, and waits for them together, for `STATS_S` at most. Event
        loops call it in a thread."""
        wait([each.ask_stats() for each in self.others], STATS_S)

    def stats(self) -> EngineStats:
        """Statistics of all replicas, as of the last `refresh_stats`: sums, and the mean of `kv_used`."""
        return sum_stats(self.replica_stats())

    def replica_stats(self) -> list[EngineStats]:
        """Statistics of each replica, as of the last `refresh_stats`."""
        return [self.own.stats(), *(stats for stats, _ in (each.stats for each in self.others))]

    def compilations(self) -> int:
        """Returns the compilations of the other replicas, since they were ready, as of the last
        `refresh_stats`."""
        return sum(count for _, count in (each.stats for each in self.others))

    def fail(self, error: NVError) -> None:
        """Ends all requests with this error. Later submits raise it."""
        for each in self.engines: each.fail(error)

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until no work is left."""
        with self._lock: self._idle.wait_for(lambda: not self._clients, timeout_s)
        self.own.join(timeout_s)

    def close(self) -> None:
        """Ends all requests with an error. Later submits raise."""
        self.own.close()
        for each in self.others: each.fail(EngineError("the model is closed", "one that is open",
                                                       "load it again"))

    # **** threads of the engines ****

    def _deliver(self, replica: int, outputs: list[EngineCoreOutput]) -> None:
        """Calls each sink once, so that a caller's thread wakes once a step."""
        by_sink: dict[Sink, list[EngineCoreOutput]] = {}
        with self._lock:
            if (failure := self.engines[replica].failure) is not None:
                outputs = [*outputs, *self._fail_outputs(replica, failure)]
            for each in outputs:
                client = self._clients.get(each.request)
                if client is None or each.index not in client.unfinished: continue
                before = client.load
                client.waiting.discard(each.index)
                self._loads[replica] += client.load - before
                if each.finish_reason is not None: self._end_sequence(each.request, client, each.index)
                each.request = client.name
                by_sink.setdefault(client.sink, []).append(each)
        for sink, part in by_sink.items(): sink(part)

    def _fail_outputs(self, replica: int, failure: NVError) -> list[EngineCoreOutput]:
        return [EngineCoreOutput(number, index, (), finish_reason="error", error=failure)
                for number, client in self._clients.items() if client.replica == replica
                for index in client.unfinished]

    def _end_sequence(self, number: str, client: Client, index: int) -> None:
        before = client.load
        client.waiting.discard(index)
        client.unfinished.discard(index)
        self._loads[client.replica] += client.load - before
        if not client.unfinished: self._forget(number)

    def _forget(self, number: str) -> Client:
        client = self._clients.pop(number)
        del self._names[client.name]
        self._loads[client.replica] -= client.load
        if not self._clients: self._idle.notify_all()
        return client


def sum_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Returns statistics of several engines as those of one."""
    def of(name: str) -> Any:
        values = [getattr(each, name) for each in stats]
        if name == "accepted_at": return tuple(map(sum, zip(*values, strict=True)))
        if name == "adapters": return values[0]
        return sum(values) / len(values) if name == "kv_used" else sum(values)
    return EngineStats(**{each.name: of(each.name) for each in fields(EngineStats)})
