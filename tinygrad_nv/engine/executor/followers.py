"""Rank 0's side of a model that several ranks have: it finds or starts them, and tells them what it does.

Protocol: `open_ranks(size)` gives the group of ranks and their `Followers`. What a model runner is
called for it tells the followers first (`tell`), in the order of its calls; each has a runner that does the
same (follower.py). So all ranks run the same steps in the same order, and meet in their collectives. Nothing
comes back but the answer to `ask`, and an error that ends everything. Each rank has the same tokens: of all
ranks' choices it takes the largest (worker/sampler.py).

Messages are Python's own (multiprocessing.connection: pickled, over a socket that both ends have to know a
secret for).
"""
from __future__ import annotations

import contextlib
import sys
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from multiprocessing.reduction import ForkingPickler
from typing import Any

from tinygrad_nv.dist import group as dist
from tinygrad_nv.dist import launcher
from tinygrad_nv.dist.ranks import HERE, Ranks
from tinygrad_nv.errors import DistError

COMMAND = (sys.executable, "-m", "tinygrad_nv.engine.executor.follower")
END_S = 10.0        # for ranks to end when they are told to
ADDRESS = "executor"


class Followers:
    """Ranks 1, 2, … that do as this one does. `local` are those that it has started."""

    def __init__(self, connections: list[Connection], local: launcher.LocalRanks | None = None) -> None:
        self.connections, self.local = connections, local
        self.lost: DistError | None = None
        self._lock = threading.Lock()

    def tell(self, name: str, *arguments: Any) -> None:
        """Has each do something, and goes on. Raises `DistError` if one is gone."""
        self.check()
        message = ForkingPickler.dumps((name, arguments))
        with self._lock:
            for rank, each in enumerate(self.connections, 1):
                try: each.send_bytes(message)
                except OSError as error: raise self._gone(rank) from error

    def check(self) -> None:
        """Raises `DistError` if one is gone."""
        if self.lost is not None: raise self.lost

    def lose(self, error: DistError) -> None:
        """Has later calls raise this."""
        self.lost = self.lost or error

    def ask(self, name: str, *arguments: Any) -> list[Any]:
        """Has each do something, and waits: what they answer."""
        self.tell(name, *arguments)
        return [self._answer(rank, each) for rank, each in enumerate(self.connections, 1)]

    def _answer(self, rank: int, connection: Connection) -> Any:
        try: fine, answer = connection.recv()
        except (EOFError, OSError) as error: raise self._gone(rank) from error
        if fine: return answer
        raise answer

    def _gone(self, rank: int) -> DistError:
        self.lost = DistError(f"rank {rank} has ended in the midst of its work",
                              "all ranks until rank 0 ends", "see what it has written, and start again")
        return self.lost

    def close(self) -> None:
        """Ends them, and waits for those that were started here."""
        if self.lost is None:
            with contextlib.suppress(DistError): self.tell("close")
        for each in self.connections: each.close()
        if self.local is not None: self.local.close(END_S)


def open_ranks(size: int) -> tuple[dist.World, Followers]:
    """The world of `size` ranks, of which this is rank 0, and the others. They were started by a launcher, or
    are started here. Raises `DistError`."""
    local = None
    if Ranks.from_environment().world_size == 1:
        dist.close()    # of a process that was alone
        local = launcher.start_local(size, COMMAND)
    try: return _met(dist.world(), size, local)
    except BaseException:
        if local is not None:
            local.close(0)
            dist.close()
        raise


def _met(world: dist.World, size: int, local: launcher.LocalRanks | None) -> tuple[dist.World, Followers]:
    if world.size != size:
        raise DistError(f"a parallel size of {size}, and {world.size} ranks were started", "as many ranks",
                        f"start {size}, or change --tensor-parallel-size")
    if world.follow:
        raise DistError("the ranks of this process have a model already", "one model of several ranks",
                        "close() it, or load the other in a process of its own")
    if world.rank: return world, Followers([])
    made = Followers(_connections(world), local)
    world.follow = True
    return world, made


def _connections(world: dist.World) -> list[Connection]:
    """One to each of the other ranks, in their order."""
    secret = world.secret()
    host = HERE if world.ranks.one_host else world.ranks.master_addr
    with Listener((host, 0), backlog=world.size, authkey=secret) as listener:
        port = listener.address[1]
        world.exchange(ADDRESS, f"{host} {port}".encode())
        found: dict[int, Connection] = {}
        while len(found) < world.size - 1:
            # what does not know the secret is no rank
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                one = listener.accept()
                found[one.recv()] = one
    return [found[rank] for rank in range(1, world.size)]
