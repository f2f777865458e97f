"""Ends all ranks, with a message that names the cause, when one is lost, hangs, or does something else.

Protocol: the transport keeps a `Record` of the collective that it is in, `begin(...)` and `end()`. A
`Watchdog(store, record)` looks at it from a thread. When a collective takes longer than NV_DIST_TIMEOUT, one
rank asks all others through the store what they are at, and says which rank is behind, or differs; all ranks
end with that verdict. A rank that is lost (store.py) ends all others at once. To end, a rank writes the
message to stderr, runs `before_end` functions, for `DRAIN_S` at most, and exits with `ENDED`, whatever its
other threads do.

Every rank numbers its collectives from 1 on, so that the n-th of all ranks must be the same. A rank whose
Python threads cannot run does not answer in `ANSWER_S`, and is named as such; a launcher ends it, as it ends
all ranks after the first that fails.
"""
from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

from tinygrad_nv import config
from tinygrad_nv.dist.frames import named
from tinygrad_nv.dist.processes import ENDED
from tinygrad_nv.dist.store import Store
from tinygrad_nv.errors import DistError

ANSWER_S = 5.0      # in which a rank must say what it is at
LOOK_S = 0.5        # between looks at what a collective came to
DRAIN_S = 30.0      # for functions that run before the end, as servers drain
FOREVER_S = 1e9
ASK, VERDICT = "watchdog/ask", "watchdog/verdict"


@dataclass(frozen=True)
class Operation:
    """Collective `number` of a rank, from 1 on: its name, the tensor that it is for, what is sent.
    `started_s` is of time.monotonic()."""
    number: int
    name: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    started_s: float

    @property
    def sent(self) -> tuple[object, ...]: return self.name, self.tensor, self.shape, self.dtype

    def __str__(self) -> str:
        return f"{self.name} #{self.number} of {self.tensor} {self.dtype}{list(self.shape)}"


class Progress(Protocol):
    """What the watchdog asks of a transport."""

    def current(self) -> Operation | None: ...

    def last(self) -> Operation | None: ...

    def failed(self) -> DistError | None: ...


class Record:
    """The collective that a rank is in, and the last one that it ended. One thread writes."""

    def __init__(self) -> None:
        self.number = 0
        self._current: Operation | None = None
        self._last: Operation | None = None

    def begin(self, name: str, tensor: str, shape: tuple[int, ...], dtype: str) -> None:
        self.number += 1
        self._current = Operation(self.number, name, tensor, shape, dtype, time.monotonic())

    def end(self) -> None: self._last, self._current = self._current, None

    def current(self) -> Operation | None: return self._current

    def last(self) -> Operation | None: return self._last

    def failed(self) -> DistError | None: return None


@dataclass(frozen=True)
class At:
    """What a rank is at: in a collective, or behind its last one. `silent`: why it does not say."""
    rank: int
    current: Operation | None = None
    last: Operation | None = None
    silent: str = ""

    @property
    def reached(self) -> int:
        """The number of the last collective that it has come to."""
        operation = self.current or self.last
        return operation.number if operation else 0

    def __str__(self) -> str:
        if self.silent: return self.silent
        if self.current is not None: return f"it is in {self.current}"
        return f"it is behind {self.last}, in its own code" if self.last else "it has not begun a collective"

    def packed(self) -> bytes:
        return json.dumps([each and asdict(each) for each in (self.current, self.last)]).encode()


def unpacked(rank: int, data: bytes) -> At:
    found = json.loads(data)
    current, last = (each and Operation(**{**each, "shape": tuple(each["shape"])}) for each in found)
    return At(rank, current, last)


def verdict(every: list[At], seconds: float) -> DistError:
    """Which rank is behind, or differs, by what all are at. Of ranks that differ, those are named that are
    not like the most."""
    spoken = [each for each in every if not each.silent]
    furthest = max((each.reached for each in spoken), default=0)
    there = [each for each in spoken if each.current is not None and each.reached == furthest]
    target = next((each.current for each in there), None)
    late = [each for each in every if each.silent or each.reached < furthest]
    gone = [each for each in spoken if each.current is None and each.reached == furthest]
    asked = "the same collectives in the same order in all ranks, each in that time"
    fix = "see what these ranks wrote last; NV_DIST_TIMEOUT allows more seconds"
    if len({each.current.sent for each in there if each.current}) > 1: return _differ(there, asked)
    for chosen, words in ((late, "{rank} has not reached {target} in {seconds:.3g} s ({at})"),
                          (gone, "{rank} has ended {target}, in which others still are ({at})")):
        if not chosen or target is None: continue
        found = [words.format(rank=named([each.rank]), target=target, seconds=seconds, at=each)
                 for each in chosen]
        return DistError("; ".join(found), asked, fix, tuple(each.rank for each in chosen))
    return DistError(f"all ranks are in {target} for more than {seconds:.3g} s", "a transport that ends it",
                     "check the network between the ranks; NV_DIST_TIMEOUT allows more seconds")


def _differ(there: list[At], asked: str) -> DistError:
    sent = [each.current.sent for each in there if each.current is not None]
    most = max(sent, key=lambda one: (sent.count(one), one == sent[0]))
    usual = next(each for each in there if each.current is not None and each.current.sent == most)
    other = [each for each in there if each.current is not None and each.current.sent != most]
    words = ", ".join(f"{named([each.rank])} is in {each.current}" for each in other)
    return DistError(f"ranks differ: {words}, but {named([usual.rank])} in {usual.current}", asked,
                     "make order, tensors and shapes the same in all ranks",
                     tuple(each.rank for each in other))


class Watchdog:
    """`timeout_s` is NV_DIST_TIMEOUT where it is None; 0 is any time. `exit` ends the process."""

    def __init__(self, store: Store, record: Progress, timeout_s: float | None = None,
                 exit: Callable[[int], object] = os._exit) -> None:
        self.store, self.record, self.exit = store, record, exit
        self.timeout_s = float(config.get("NV_DIST_TIMEOUT")) if timeout_s is None else timeout_s
        self.before: list[Callable[[DistError], None]] = []
        self.closed = threading.Event()
        self._ending = threading.Lock()
        store.watch(self._lost)
        for target in (self._look, self._listen):
            threading.Thread(target=target, name="tinygrad_nv watchdog", daemon=True).start()

    def before_end(self, function: Callable[[DistError], None]) -> None:
        """Calls it with the error before this process is ended: a server drains there."""
        self.before.append(function)

    def close(self) -> None:
        """Watches no more: before `store.close()`."""
        self.closed.set()

    # **** threads ****

    def _look(self) -> None:
        """Sleeps until the collective that it saw could be late, at most a quarter of the timeout."""
        while not self.closed.wait(self._patience()):
            if (failed := self.record.failed()) is not None: return self._end(failed)
            if not self.timeout_s: continue
            if (now := self.record.current()) is None: continue
            if time.monotonic() - now.started_s < self.timeout_s: continue
            with contextlib.suppress(DistError):    # a rank that is lost ends all by another way
                if self.store.add(ASK + "/asked", 1) == 1: self._judge()
            return

    def _patience(self) -> float:
        now = self.record.current()
        if not self.timeout_s: return LOOK_S
        left = self.timeout_s if now is None else now.started_s + self.timeout_s - time.monotonic()
        return min(max(left, 0.005), self.timeout_s / 4, LOOK_S)

    def _listen(self) -> None:
        """Waits until a rank asks, and for what it says then."""
        with contextlib.suppress(DistError):
            self.store.get(ASK, FOREVER_S)
            self.store.set(f"{ASK}/{self.store.ranks.rank}", self._at().packed())
            found, expected, fix, ranks = json.loads(self.store.get(VERDICT, 2 * ANSWER_S))
            self._end(DistError(found, expected, fix, tuple(ranks)))

    def _at(self) -> At: return At(self.store.ranks.rank, self.record.current(), self.record.last())

    def _judge(self) -> None:
        self.store.set(ASK, b"")
        end, every = time.monotonic() + ANSWER_S, []
        for rank in range(self.store.ranks.world_size):
            left = max(0.01, end - time.monotonic())
            try: every.append(unpacked(rank, self.store.get(f"{ASK}/{rank}", left)))
            except DistError: every.append(At(rank, silent=self._why_silent(rank)))
        error = verdict(every, self.timeout_s)
        self.store.set(VERDICT, json.dumps([error.found, error.expected, error.fix, error.ranks]).encode())

    def _why_silent(self, rank: int) -> str:
        if rank in self.store.left: return "it has ended, and closed the store"
        return f"it does not answer in {ANSWER_S:g} s: stopped, or in a call that lets no other thread run"

    def _lost(self, rank: int, reason: str) -> None:
        if rank == self.store.ranks.rank: return
        now = self.record.current()
        where = f" while this rank was in {now}" if now is not None else ""
        self._end(DistError(f"rank {rank} was lost{where}: {reason}", "all ranks, until the last collective",
                            f"see what rank {rank} wrote last", (rank,)))

    def _end(self, error: DistError) -> None:
        """Of this process; the first reason counts."""
        if self.closed.is_set() or not self._ending.acquire(blocking=False): return
        with contextlib.suppress(OSError, ValueError):
            print(f"tinygrad-nv: rank {self.store.ranks.rank} ends: {error}", file=sys.stderr, flush=True)
        drain = threading.Thread(target=self._drain, args=(error,), daemon=True)
        drain.start()
        drain.join(DRAIN_S)
        with contextlib.suppress(OSError, ValueError): sys.stdout.flush()
        self.store.abort(error.found)
        self.exit(ENDED)

    def _drain(self, error: DistError) -> None:
        for function in self.before: function(error)
