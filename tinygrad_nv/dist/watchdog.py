"""Ends all ranks, with a message that names the cause, when one is lost, hangs, or calls another collective.

Protocol: a thread of `Watchdog(store, groups)` looks at the collective that each group of this rank is in.
When one takes longer than NV_DIST_TIMEOUT, a rank asks all others through the store which collective they are
in, and finds the rank that is behind, or in another one; all ranks end with that verdict. A rank that is lost
(store.py) ends all others at once. To end, a rank writes the message to stderr, runs `before_end` functions,
for `DRAIN_S` at most, and exits with `ENDED`, whatever its other threads do.

The ranks of a group number its collectives in the same way, so that the n-th of all must be the same. A rank
whose Python threads cannot run does not answer in `ANSWER_S`, and is named as such; a launcher ends it, as it
ends all ranks after the first that fails.
"""
from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinygrad_nv import config
from tinygrad_nv.dist.frames import name_ranks, pack_error, unpack_error
from tinygrad_nv.dist.processes import ENDED
from tinygrad_nv.dist.store import Store
from tinygrad_nv.errors import DistError, DistTimeout

ANSWER_S = 5.0      # in which a rank must say what it is at
LOOK_S = 0.5        # between looks at what collectives came to
LEFT_S = 2.0        # a collective that others end may still be running here
DRAIN_S = 30.0      # for functions that run before the end, as servers drain
FOREVER_S = 1e9
ASK, VERDICT = "watchdog/ask", "watchdog/verdict"
ONE_TO_ONE = ("send", "recv")       # of two ranks of a group: what the others are at is no fault


class Operation(Protocol):
    """A collective that runs. `started_s` is of time.monotonic(); its `str` says name, number, tensor, shape
    and dtype: equal texts are the same collective."""
    @property
    def number(self) -> int: ...

    @property
    def started_s(self) -> float: ...


class Group(Protocol):
    """Group of ranks as the watchdog asks it: `members` of the world, and the collective that this rank is
    in, or has ended last."""
    @property
    def name(self) -> str: ...

    @property
    def members(self) -> tuple[int, ...]: ...

    def current(self) -> Operation | None: ...

    def last(self) -> Operation | None: ...

    def failure(self) -> DistError | None: ...


@dataclass(frozen=True)
class Position:
    """A collective, by its number in the group, and as people read it."""
    number: int
    text: str

    def __str__(self) -> str: return self.text


@dataclass(frozen=True)
class Progress:
    """How far a rank has come with the collectives of a group: `current` is the one that it is in, `last` the
    one that it has ended last. `other` is the collective of another group that it is in; `silent` says why it
    does not answer."""
    rank: int
    current: Position | None = None
    last: Position | None = None
    other: str = ""
    silent: str = ""

    @property
    def last_number(self) -> int:
        """The number of the last collective that it has come to."""
        step = self.current or self.last
        return step.number if step else 0

    def __str__(self) -> str:
        if self.silent: return self.silent
        if self.current is not None: return f"it is in {self.current}"
        if self.other: return f"it is in {self.other}"
        return f"it is behind {self.last}, in its own code" if self.last else "it has not begun a collective"


def keys(groups: Sequence[Group]) -> list[str]:
    """The names of groups; ranks make those of one name in the same order."""
    names = [group.name for group in groups]
    return [f"{name} ({n})" if (n := names[:at].count(name)) else name for at, name in enumerate(names)]


def pack(groups: Sequence[Group]) -> bytes:
    """Returns what this rank is at in all its groups."""
    every = {key: [each and [each.number, str(each)] for each in (group.current(), group.last())]
             for key, group in zip(keys(groups), groups, strict=True)}
    return json.dumps(every).encode()


def unpack(rank: int, group: str, data: bytes) -> Progress:
    """Returns what a rank is at in a group."""
    every = json.loads(data)
    current, last = (each and Position(*each) for each in every.get(group, (None, None)))
    other = next((f"{each[0][1]} of group {name}" for name, each in every.items()
                  if each[0] and name != group), "")
    return Progress(rank, current, last, other)


def verdict(every: list[Progress], stuck: str, seconds: float) -> DistError:
    """Returns which rank is behind, or differs, by what all ranks of a group are at; `stuck` takes too long.
    Of ranks that differ, those are named that are not like the most."""
    asked = "the same collectives in the same order in all ranks, each in that time"
    fix = "see what these ranks wrote last; NV_DIST_TIMEOUT allows more seconds"
    if stuck.startswith(ONE_TO_ONE):
        words = "; ".join(f"rank {each.rank}: {each}" for each in every)
        return DistError(f"{stuck} takes more than {seconds:.3g} s ({words})", asked, fix)
    spoken = [each for each in every if not each.silent]
    furthest = max((each.last_number for each in spoken), default=0)
    there = [each for each in spoken if each.current is not None and each.last_number == furthest]
    if len({each.current for each in there}) > 1: return _differ(there, asked)
    target = next((each.current for each in there), None) or stuck
    late = [each for each in every if each.silent or each.last_number < furthest]
    gone = [each for each in spoken if each.current is None and each.last_number == furthest]
    for chosen, words in ((late, "{rank} has not reached {target} in {seconds:.3g} s ({at})"),
                          (gone, "{rank} has ended {target}, in which others still are ({at})")):
        found = [words.format(rank=name_ranks([each.rank]), target=target, seconds=seconds, at=each)
                 for each in chosen]
        if found: return DistError("; ".join(found), asked, fix, tuple(each.rank for each in chosen))
    return DistError(f"all ranks are in {target} for more than {seconds:.3g} s", "a transport that ends it",
                     "check the network between the ranks; NV_DIST_TIMEOUT allows more seconds")


def _differ(there: list[Progress], asked: str) -> DistError:
    steps = [each.current for each in there]
    most = max(steps, key=lambda one: (steps.count(one), one == steps[0]))
    usual = next(each for each in there if each.current == most)
    other = [each for each in there if each.current != most]
    words = ", ".join(f"{name_ranks([each.rank])} is in {each.current}" for each in other)
    return DistError(f"ranks differ: {words}, but {name_ranks([usual.rank])} in {usual.current}", asked,
                     "make order, tensors and shapes the same in all ranks",
                     tuple(each.rank for each in other))


class Watchdog:
    """`groups` may grow. `timeout_s` is NV_DIST_TIMEOUT where it is None; 0 is any time. `exit` ends the
    process."""

    def __init__(self, store: Store, groups: Sequence[Group], timeout_s: float | None = None,
                 exit: Callable[[int], object] = os._exit) -> None:
        self.store, self.groups, self.exit = store, groups, exit
        self.timeout_s = float(config.get("NV_DIST_TIMEOUT")) if timeout_s is None else timeout_s
        self.before: list[Callable[[DistError], None]] = []
        self.closed = threading.Event()
        self._seen: dict[int, float] = {}       # ranks that closed the store, and since when that is known
        self._ending, self._ended = threading.Lock(), threading.Event()
        atexit.register(self._wait_for_end)
        looker, self._listener = (threading.Thread(target=each, name="tinygrad_nv watchdog", daemon=True)
                                  for each in (self._look, self._listen))
        looker.start()
        self._listener.start()
        store.watch(self._lose)

    def before_end(self, function: Callable[[DistError], None]) -> None:
        """Calls it with the error before this process is ended: a server drains there."""
        self.before.append(function)

    def close(self) -> None:
        """Watches no more: before `store.close()`."""
        self.closed.set()
        atexit.unregister(self._wait_for_end)

    # **** threads ****

    def _oldest(self) -> tuple[Group, Operation] | None:
        """The collective that this rank is in for the longest time."""
        found = [(group, now) for group in list(self.groups) if (now := group.current()) is not None]
        return min(found, key=lambda each: each[1].started_s, default=None)

    def _look(self) -> None:
        """Sleeps until the collective that it saw could be late, at most a quarter of the timeout, or looks
        what collectives came to."""
        while not self.closed.wait(self._patience()):
            failed = next((error for each in list(self.groups) if (error := each.failure()) is not None),
                          None)
            if failed is not None: return self._end(failed)
            if (oldest := self._oldest()) is None: continue
            if (left := self._error_of_left(*oldest)) is not None: return self._end(left)
            if not self.timeout_s: continue
            if time.monotonic() - oldest[1].started_s < self.timeout_s: continue
            try:
                if self.store.add(ASK + "/asked", 1, 0) == 1: self._judge(*oldest)
            except DistTimeout as error: self._end(error)    # rank 0, which has the store, is stopped
            except DistError: pass      # a rank that is lost ends all by another way
            return

    def _error_of_left(self, group: Group, stuck: Operation) -> DistError | None:
        """An error for a collective that waits for ranks that have ended in good order."""
        now = time.monotonic()
        for rank in list(self.store.left): self._seen.setdefault(rank, now)
        gone = [rank for rank in group.members if now - self._seen.get(rank, now) >= LEFT_S]
        if not gone or now - stuck.started_s < LEFT_S: return None
        return DistError(f"{name_ranks(gone)} ended while this rank was in {stuck}",
                         "the same collectives in the same order in all ranks",
                         "see which of them these ranks do not call", tuple(gone))

    def _patience(self) -> float:
        oldest = self._oldest()
        if not self.timeout_s: return LOOK_S
        end = self.timeout_s + (time.monotonic() if oldest is None else oldest[1].started_s)
        return min(max(end - time.monotonic(), 0.005), self.timeout_s / 4, LOOK_S)

    def _listen(self) -> None:
        """Waits until a rank asks, and for what it says then."""
        with contextlib.suppress(DistError):
            self.store.get(ASK, FOREVER_S)
            try:
                self.store.set(f"{ASK}/{self.store.ranks.rank}", pack(list(self.groups)))
                error = unpack_error(self.store.get(VERDICT, 2 * ANSWER_S))
            except DistTimeout as late: error = late
            else: self._confirm_verdict()
            self._end(error)

    def _confirm_verdict(self) -> None:
        """Says that this rank has the verdict. Rank 0, with which the store ends, waits until all others say
        so, for `LEFT_S` at most: one that is stopped never does."""
        ranks, end = self.store.ranks, time.monotonic() + LEFT_S
        if ranks.rank:
            with contextlib.suppress(DistError): self.store.set(f"{VERDICT}/{ranks.rank}", b"")
            return
        for rank in range(1, ranks.world_size):
            while not self._is_gone(rank) and (left := end - time.monotonic()) > 0:
                try: self.store.get(f"{VERDICT}/{rank}", left)
                except DistError: time.sleep(0.01)    # the end of a quicker rank fails what waits
                else: break

    def _is_gone(self, rank: int) -> bool: return rank in self.store.lost or rank in self.store.left

    def _judge(self, group: Group, stuck: Operation) -> None:
        self.store.set(ASK, b"")
        end, every = time.monotonic() + ANSWER_S, []
        groups = list(self.groups)
        key = keys(groups)[groups.index(group)]
        for rank in group.members:
            left = max(0.01, end - time.monotonic())
            try: every.append(unpack(rank, key, self.store.get(f"{ASK}/{rank}", left)))
            except DistError: every.append(Progress(rank, silent=self._why_silent(rank)))
        self.store.set(VERDICT, pack_error(verdict(every, str(stuck), self.timeout_s)))

    def _why_silent(self, rank: int) -> str:
        if rank in self.store.left: return "it has ended, and closed the store"
        return f"it does not answer in {ANSWER_S:g} s: stopped, or in a call that lets no other thread run"

    def _lose(self, rank: int, reason: str) -> None:
        if rank == self.store.ranks.rank: return
        self._listener.join(ANSWER_S)   # which has the verdict, if that is why the rank has ended
        oldest = self._oldest()
        where = f" while this rank was in {oldest[1]}" if oldest is not None else ""
        self._end(DistError(f"rank {rank} was lost{where}: {reason}", "all ranks, until the last collective",
                            f"see what rank {rank} wrote last", (rank,)))

    def _end(self, error: DistError) -> None:
        """Ends this process; the first reason counts."""
        if self.closed.is_set() or not self._ending.acquire(blocking=False): return
        with contextlib.suppress(OSError, ValueError):
            print(f"tinygrad-nv: rank {self.store.ranks.rank} ends: {error}", file=sys.stderr, flush=True)
        try:
            drain = threading.Thread(target=self._drain, args=(error,), daemon=True)
            drain.start()
            drain.join(DRAIN_S)
            with contextlib.suppress(OSError, ValueError): sys.stdout.flush()
            self.store.abort(error.found)
        finally:
            self.exit(ENDED)
            self._ended.set()

    def _wait_for_end(self) -> None:
        """Keeps a program whose last collective was given up from exiting with 0 before it is ended."""
        if self._ending.locked(): self._ended.wait()

    def _drain(self, error: DistError) -> None:
        for function in self.before: function(error)
