"""A rank that does as rank 0 does: `python -m tinygrad_nv.engine.executor.follower`.

Protocol: it meets the other ranks, and takes what rank 0 tells it (followers.py), one after the other: `open`
loads its part of a model, and the names of a model runner's methods call these. It ends when it is told to,
when rank 0 is gone, or with an error, which it writes, and sends where rank 0 waits for an answer.
"""
from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from concurrent.futures import Future
from multiprocessing.connection import Client, Connection
from typing import Any

from tinygrad_nv.dist import group as dist
from tinygrad_nv.dist.processes import ENDED
from tinygrad_nv.engine.executor.followers import ADDRESS
from tinygrad_nv.engine.executor.plan import RunnerPlan, load_part, part_of
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.errors import NVError

ANSWERED = ("open", "warm_up")


class Follower:
    """The runner of this rank."""

    def __init__(self, world: dist.World) -> None:
        self.world = world
        self.runner: ModelRunner | None = None

    def run(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Does what rank 0 does."""
        if name == "open": return self._open(*arguments)
        assert self.runner is not None, "rank 0 opens a model first"
        if name == "warm_up": return self.runner.warm_up(shapes=arguments[0])
        if name == "launch": return self.runner.launch(*arguments).add_done_callback(self._end_on_error)
        return getattr(self.runner, name)(*arguments)

    def _open(self, plan: RunnerPlan) -> None:
        self.runner = load_part(part_of(self.world, plan), plan)

    def _end_on_error(self, done: Future[Any]) -> None:
        """Ends this rank, and by that all: it is no longer where the others are."""
        if (error := done.exception()) is None: return
        print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
        if self.world.store is not None: self.world.store.abort(_said(error))
        os._exit(1 if self.world.ended is None else ENDED)

    def close(self) -> None:
        """Ends the runner."""
        if self.runner is not None: self.runner.close()


def _said(error: BaseException) -> str:
    """What the other ranks are told."""
    return error.found if isinstance(error, NVError) else f"it ended with {type(error).__name__}: {error}"


def follow(world: dist.World) -> int:
    """Does as rank 0 does until it ends: the status to exit with."""
    connection = _connect(world)
    follower = Follower(world)
    try:
        while True:
            try: name, arguments = connection.recv()
            except (EOFError, OSError): return 1
            if name == "close": return 0
            try: answer = True, follower.run(name, arguments)
            except NVError as error: answer = False, error
            if name in ANSWERED: connection.send(answer)
            elif not answer[0]: raise answer[1]
    except BaseException as error:
        if world.store is not None: world.store.abort(_said(error))
        raise
    finally:
        for group in world.groups: group.abort()
        follower.close()
        dist.close()


def _connect(world: dist.World) -> Connection:
    secret = world.secret()
    host, port = world.exchange(ADDRESS, b"")[0].decode().split()
    made = Client((host, int(port)), authkey=secret)
    made.send(world.rank)
    return made


def main() -> int:
    """The program of a rank that rank 0 has started. Ctrl-C is rank 0's: it ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert threading.current_thread() is threading.main_thread()
    try:
        world = dist.init()
        return follow(world)
    except NVError as error:
        print(f"rank: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__": raise SystemExit(main())
