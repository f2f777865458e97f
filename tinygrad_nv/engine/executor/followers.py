"""The side of the rank that leads a replica: what it tells the others, so that they do as it does.

Protocol: what a model runner is called for it tells the followers first (`tell`), in the order of its calls;
each has a runner that does the same (follower.py). So all ranks of a replica run the same steps in the same
order, and call the same collectives. Nothing comes back but the answers to `together`, and an error that
ends everything. Each rank has the same tokens: of all ranks' choices it takes the largest
(worker/sampler_steps.py).

While a model is loaded and warmed up, the first error of any rank is that of all: it is raised here at once,
with the rank's number, and what waits for other ranks ends.
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

from tinygrad_nv.errors import DistError, NVError

LOOK_S = 0.2        # until a rank that waits for answers looks whether it has failed itself
T = TypeVar("T")


class Followers:
    """The other ranks of a replica, by their numbers. `interrupt(why)` ends what this rank waits for."""

    def __init__(self, connections: Mapping[int, Connection],
                 interrupt: Callable[[DistError], None] = lambda why: None) -> None:
        self.connections, self.interrupt = connections, interrupt
        self.lost: NVError | None = None    # why they cannot go on
        self._lock, self._failing = threading.Lock(), threading.Lock()

    def tell(self, name: str, *arguments: Any) -> None:
        """Has each do something, and goes on. Raises `DistError` if one is gone."""
        self.check()
        message = ForkingPickler.dumps((name, arguments))
        with self._lock:
            for rank, each in self.connections.items():
                try: each.send_bytes(message)
                except OSError as error: raise self._lose_rank(rank) from error

    def check(self) -> None:
        """Raises why they cannot go on."""
        if self.lost is not None: raise self.lost

    def lose(self, error: NVError) -> None:
        """Has later calls raise this."""
        self.lost = self.lost or error

    def fail(self, error: BaseException) -> NVError:
        """Ends what ranks do together because of an error of one: the first counts, which is returned."""
        with self._failing:
            if self.lost is not None: return self.lost
            self.lost = error if isinstance(error, NVError) else DistError(error_text(error))
        self.interrupt(self.lost if isinstance(self.lost, DistError) else DistError(self.lost.found))
        return self.lost

    def together(self, task: Callable[[], T], name: str, *arguments: Any) -> tuple[T, list[Any]]:
        """Does a task while each does something that it answers: what both have come to. Raises the first
        error of any of them."""
        with ThreadPoolExecutor(1) as waits:
            others = waits.submit(self._ask, name, *arguments)
            try: made = task()
            except BaseException as error:
                cause = self.fail(error)
                if cause is not error and isinstance(error, NVError): raise cause from error
                raise
            return made, others.result()

    def _ask(self, name: str, *arguments: Any) -> list[Any]:
        self.tell(name, *arguments)
        answers, ranks = dict[int, Any](), {each: rank for rank, each in self.connections.items()}
        while len(answers) < len(ranks):
            self.check()
            for each in wait([one for one, rank in ranks.items() if rank not in answers], LOOK_S):
                assert isinstance(each, Connection)
                answers[ranks[each]] = self._answer(ranks[each], each)
        return [answers[rank] for rank in self.connections]

    def _answer(self, rank: int, connection: Connection) -> Any:
        try: fine, answer = connection.recv()
        except (EOFError, OSError) as error: raise self.fail(rank_ended(rank)) from error
        if fine: return answer
        raise self.fail(of_rank(rank, answer))

    def _lose_rank(self, rank: int) -> NVError:
        self.lose(rank_ended(rank))
        assert self.lost is not None
        return self.lost

    def close(self) -> None:
        """Ends them, and says whether all went well."""
        message = ForkingPickler.dumps(("close", (self.lost is None,)))
        with self._lock:
            for each in self.connections.values():
                with contextlib.suppress(OSError): each.send_bytes(message)
                each.close()


def rank_ended(rank: int) -> DistError:
    """Returns the error for a rank that does not answer any more."""
    return DistError(f"rank {rank} has ended in the midst of its work", "all ranks until rank 0 ends",
                     "see what it has written, and start again", (rank,))


def error_text(error: BaseException) -> str:
    """Returns the text of an error that other ranks are told."""
    return error.found if isinstance(error, NVError) else f"it ended with {type(error).__name__}: {error}"


def of_rank(rank: int, error: NVError) -> NVError:
    """An error with the number of its rank."""
    if error.found.startswith("rank "): return error
    made = copy(error)
    NVError.__init__(made, f"rank {rank}: {error.found}", error.expected, error.fix)
    return made
