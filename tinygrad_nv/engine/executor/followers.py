"""Rank 0's side of a model that several ranks have: it finds or starts them, and tells them what it does.

Protocol: `open_ranks(size, options)` gives the group of ranks and their `Followers`. What a model runner is
called for it tells the followers first (`tell`), in the order of its calls; each has a runner that does the
same (follower.py). So all ranks run the same steps in the same order, and meet in their collectives. Nothing
comes back but the answer to `ask`, and an error that ends everything. Each rank samples the same tokens:
their logits have the same bits.

Messages are Python's own (multiprocessing.connection: pickled, over a socket that both ends have to know a
secret for). The secret goes to ranks by their environment or by the store, and never on a command line.
"""
from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Listener
from multiprocessing.reduction import ForkingPickler
from typing import Any

from tinygrad.helpers import NUM_CPU_THREADS

from tinygrad_nv.dist import group as dist
from tinygrad_nv.dist.ranks import Ranks
from tinygrad_nv.errors import DistError
from tinygrad_nv.runtime.cpu.threads import explicit, threads

HERE = "127.0.0.1"
START_S = 120.0     # for ranks to import the package and come
END_S = 10.0        # for ranks to end when they are told to
ADDRESS = "executor"


class Followers:
    """Ranks 1, 2, … that do as this one does. `processes` are those that it has started."""

    def __init__(self, connections: list[Connection], processes: list[subprocess.Popen[bytes]]) -> None:
        self.connections, self.processes = connections, processes
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
        for process in self.processes:
            try: process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def open_ranks(size: int) -> tuple[dist.World, Followers]:
    """The world of `size` ranks, of which this is rank 0, and the others. They were started by a launcher, or
    are started here. Raises `DistError`."""
    processes: list[subprocess.Popen[bytes]] = []
    found = Ranks.from_environment()
    if found.world_size == 1:
        ranks, processes = _start(size)
        world = dist.init(ranks=ranks)
    else: world = dist.world()
    if world.rank: return world, Followers([], [])
    if world.size != size:
        raise DistError(f"a parallel size of {size}, and {world.size} ranks were started", "as many ranks",
                        f"start {size}, or change --tensor-parallel-size")
    try: return world, Followers(_connections(world), processes)
    except BaseException:
        for process in processes: process.kill()
        raise


def _start(size: int) -> tuple[Ranks, list[subprocess.Popen[bytes]]]:
    """Starts ranks 1 … size − 1 on this machine."""
    with socket.create_server((HERE, 0)) as free: port = free.getsockname()[1]
    os.environ.setdefault("NV_DIST_TOKEN", secrets.token_hex(16))
    # a rank's share of the cores
    share = max(1, threads() // size)
    if not explicit(): os.environ["NUM_CPU_THREADS"], NUM_CPU_THREADS.value = str(share), share
    common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": HERE,
              "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "tinygrad_nv.engine.executor.follower"]
    own = [{**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(1, size)]
    made = [subprocess.Popen(command, env=each, stdin=subprocess.DEVNULL) for each in own]
    return Ranks(0, size, 0, size, 0, HERE, port, "launch"), made


def _connections(world: dist.World) -> list[Connection]:
    """One to each of the other ranks, in their order."""
    secret = secrets.token_bytes(16)
    host = HERE if world.ranks.one_host else world.ranks.master_addr
    with Listener((host, 0), backlog=world.size, authkey=secret) as listener:
        port = listener.address[1]
        world.exchange(ADDRESS, f"{host} {port} {secret.hex()}".encode())
        found: dict[int, Connection] = {}
        while len(found) < world.size - 1:
            one = listener.accept()
            found[one.recv()] = one
    return [found[rank] for rank in range(1, world.size)]
