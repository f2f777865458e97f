"""A rank that does as another does: `python -m tinygrad_nv.engine.executor.follower SIZE`.

Protocol: it connects to the other ranks (connections.py), of which SIZE are a replica. One that leads a
replica is an engine of its own (replica.py). The others take what the rank that leads them tells
(followers.py), one after the other: `open` loads its part of a model, and the names of a model runner's
methods call these. A rank ends when it is told to, when the rank that it follows is gone, or with an error,
which it writes, and sends where an answer is waited for.
"""
from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from tinygrad_nv.dist import group as dist
from tinygrad_nv.dist.processes import ENDED
from tinygrad_nv.engine.executor.connections import connect
from tinygrad_nv.engine.executor.followers import error_text
from tinygrad_nv.engine.executor.plan import (
    PageBudget,
    RunnerPlan,
    load_rank,
    on_rank,
    pages_of,
    weight_bytes_of,
)
from tinygrad_nv.engine.executor.replica import Replica
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.errors import DistError, NVError

ANSWERED = ("pages", "open", "warm_up")


class Follower:
    """The runner of this rank, and what it is told."""

    def __init__(self, world: dist.World, connection: Connection) -> None:
        self.world, self.connection = world, connection
        self.runner: ModelRunner | None = None

    def serve(self) -> int:
        """Does as it is told until it ends: the status to exit with."""
        while True:
            try: name, arguments = self.connection.recv()
            except (EOFError, OSError): return 1
            if name == "close":
                # `follow` gives up collectives: after that ranks no longer close each other's memory
                if not arguments[0]: return 0
                self.close()
                self.world.leave_peers()
                return 0
            if name in ANSWERED: self._answer(name, arguments)
            else: self.run(name, arguments)

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> None:
        try: answer = True, self.run(name, arguments)
        except NVError as error: answer = False, error
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            answer = False, DistError(error_text(error))
        self.connection.send(answer)

    def run(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Does what the rank that leads does."""
        if name == "pages": return self._pages(*arguments)
        if name == "open": return self._open(*arguments)
        assert self.runner is not None, "a model is opened first"
        if name == "warm_up": return self.runner.warm_up(shapes=arguments[0])
        if name == "launch": return self.runner.launch(*arguments).add_done_callback(self._end_on_error)
        return getattr(self.runner, name)(*arguments)

    def _pages(self, plan: RunnerPlan, budget: PageBudget) -> int:
        rank, plan = self.world.rank, on_rank(self.world, plan)
        return pages_of(rank, plan, budget, weight_bytes_of(rank, plan))

    def _open(self, plan: RunnerPlan) -> None:
        self.runner = load_rank(self.world, plan)

    def _end_on_error(self, done: Future[Any]) -> None:
        """Ends this rank, and by that all: it is no longer where the others are."""
        if (error := done.exception()) is None: return
        print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
        if self.world.store is not None: self.world.store.abort(error_text(error))
        os._exit(1 if self.world.ended is None else ENDED)

    def close(self) -> None:
        """Ends the runner."""
        if self.runner is not None: self.runner.close()
        self.runner = None


def follow(world: dist.World, size: int) -> int:
    """Serves rank 0 from another rank, in a world whose replicas have `size` ranks, until rank 0 ends:
    returns the status to exit with."""
    found = connect(world, size)
    assert found.up is not None, "rank 0 follows none"
    role = Follower(world, found.up) if world.rank % size else Replica(world, found)
    try: return role.serve()
    except BaseException as error:
        if world.store is not None: world.store.abort(error_text(error))
        raise
    finally:
        for group in world.groups: group.abort()
        role.close()
        dist.close()


def main() -> int:
    """The program of a rank that rank 0 has started. Ctrl-C is rank 0's: it ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert threading.current_thread() is threading.main_thread()
    try: return follow(dist.init(), int(sys.argv[1]))
    except NVError as error:
        print(f"rank: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__": raise SystemExit(main())
