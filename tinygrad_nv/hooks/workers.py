"""tinygrad's processes that compile, one of which may be killed: for its memory, or by a signal to its group.

`multiprocessing.Pool` starts another one in its place, but what the first was compiling is lost, and one that
was idle takes the lock of the queue with it: tinygrad 0.14.0 then waits for ever. Here a pool that lost a
process is given up, and what is missing is compiled in this process.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from multiprocessing import TimeoutError as NothingYet
from multiprocessing.pool import TERMINATE
from typing import Any
from weakref import WeakKeyDictionary

from tinygrad.engine import worker

PATIENCE_S = 0.5        # without a result, until the processes are looked at
# the processes of a pool, those that ended too
_seen: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()


class Workers:
    """The pool that `make` returns, tinygrad's own, for `imap_unordered`, which is what tinygrad calls."""

    def __init__(self, make: Callable[[], Any]) -> None: self.make = make

    def imap_unordered(self, compile_task: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        """Yields a result for each task, in any order. Tasks and results begin with a number. What a task
        raises is raised here."""
        left, pool = {task[0]: task for task in tasks}, self.make()
        if _has_lost_one(pool):
            _give_up(pool)
            pool = self.make()
        results = pool.imap_unordered(compile_task, [*left.values()])
        while left and not _has_lost_one(pool):
            try: result = results.next(PATIENCE_S)
            except NothingYet: continue
            del left[result[0]]
            yield result
        if left: _give_up(pool)
        yield from map(compile_task, left.values())


def _has_lost_one(pool: Any) -> bool:
    """Tells whether a process did not end by itself. (One that has done its number of tasks does.)"""
    seen = _seen.setdefault(pool, set())
    seen.update(pool._pool)
    return any(each.exitcode for each in seen)


def _give_up(pool: Any) -> None:
    """Ends a pool without its queue's lock, which `Pool.terminate` takes."""
    pool._terminate.cancel()
    pool._worker_handler._state = TERMINATE     # which starts no more processes
    for each in pool._pool: each.kill()
    worker.worker_pool = None
