"""How ranks that have a model find each other: they are started, or a launcher has, and are connected.

Protocol: a replica of the model has `size` ranks, which stand one after the other; the first of them leads
it, and rank 0 leads all. `open_ranks(ranks, size)` starts ranks where no launcher has, and every rank calls
`connect(world, size)`: followers are connected to the rank that leads their replica, and these to rank 0.

Messages are Python's own (multiprocessing.connection: pickled, over a socket that both ends have to know a
secret for). A process that connects and does not know it, or is silent for `HELLO_S`, is not a rank.
"""
from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue

from tinygrad_nv.dist import group as dist
from tinygrad_nv.dist import launcher
from tinygrad_nv.dist.ranks import HERE, Ranks
from tinygrad_nv.errors import DistError

COMMAND = (sys.executable, "-m", "tinygrad_nv.engine.executor.follower")
ADDRESS = "executor"
HELLO_S = 5.0       # between messages of a handshake
ACCEPT_S = 0.05     # until it is looked at whether all are there


@dataclass(frozen=True)
class Connections:
    """A rank's connections: `up` to the rank that it follows; to ranks that follow it, by their numbers: the
    others of its replica, and, of rank 0, those that lead the other replicas."""
    up: Connection | None
    followers: dict[int, Connection]
    leaders: dict[int, Connection]


_of_launcher: dist.World | None = None     # whose ranks had a model


def open_ranks(ranks: int, size: int) -> tuple[dist.World, launcher.LocalRanks | None]:
    """The world of `ranks` ranks, of which replicas have `size`, and those that were started here. Raises
    `DistError`."""
    local = None
    if Ranks.from_environment().world_size == 1:
        dist.close()    # of a process that was alone
        local = launcher.start_local(ranks, (*COMMAND, str(size)))
    elif _of_launcher is not None and not _of_launcher.follow:
        raise DistError("the ranks of this launcher had a model, and ended with it",
                        "one model of several ranks in a run", "keep the model, or start the program again")
    try:
        world = dist.world() if local is None else dist.init(watch_ranks=local.watch)
        return _check_ranks(world, ranks, local), local
    except BaseException:
        if local is not None:
            local.close(0)
            dist.close()
        raise


def _check_ranks(world: dist.World, ranks: int, local: launcher.LocalRanks | None) -> dist.World:
    global _of_launcher
    if world.size != ranks:
        raise DistError(f"parallel sizes of {ranks} ranks in all, and {world.size} ranks were started",
                        "as many ranks", f"start {ranks}, or change --tensor-parallel-size, "
                        "--pipeline-parallel-size or --data-parallel-size")
    if world.follow:
        raise DistError("the ranks of this process have a model already", "one model of several ranks",
                        "close() it, or load the other in a process of its own")
    if local is None: _of_launcher = world
    world.follow = True
    return world


def connect(world: dist.World, size: int) -> Connections:
    """Makes this rank's connections. Every rank has to call it."""
    rank, first = world.rank, world.rank // size * size
    followers = range(first + 1, first + size) if rank == first else range(0)
    leaders = range(size, world.size, size) if rank == 0 else range(0)
    secret = world.secret()
    with contextlib.ExitStack() as stack:
        server, own = None, ""
        if expected := {*followers, *leaders}:
            server = stack.enter_context(socket.create_server((host := _host(world.ranks), 0)))
            own = f"{host} {server.getsockname()[1]}"
        addresses = world.exchange(ADDRESS, own.encode())
        up = None if rank == 0 else _call(addresses[0 if rank == first else first].decode(), rank, secret)
        found = {} if server is None else _accept(server, expected, secret)
    return Connections(up, {each: found[each] for each in followers}, {each: found[each] for each in leaders})


def _host(ranks: Ranks) -> str:
    """The address of this host that other ranks reach."""
    if ranks.one_host: return HERE
    if ranks.rank == 0: return ranks.master_addr
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as to_master:     # connect() of UDP sends nothing
        to_master.connect((ranks.master_addr, ranks.master_port or 1))
        return str(to_master.getsockname()[0])


def _call(address: str, rank: int, secret: bytes) -> Connection:
    host, port = address.split()
    made = Client((host, int(port)), authkey=secret)
    made.send(rank)
    return made


def _accept(server: socket.socket, expected: Collection[int], secret: bytes) -> dict[int, Connection]:
    """Accepts one connection from each of these ranks."""
    connected, found = SimpleQueue[tuple[int, Connection]](), dict[int, Connection]()
    server.settimeout(ACCEPT_S)
    while len(found) < len(expected):
        with contextlib.suppress(TimeoutError):
            one = server.accept()[0]
            threading.Thread(target=_greet, args=(one, secret, connected), daemon=True).start()
        while not connected.empty():
            rank, connection = connected.get()
            found[rank] = connection
    return found


def _greet(one: socket.socket, secret: bytes, connected: SimpleQueue[tuple[int, Connection]]) -> None:
    """Has what connected show that it is a rank. (In a thread: other ranks need not wait for a process that
    is not a rank.)"""
    with one:
        _set_read_timeout(one, HELLO_S)
        made = Connection(one.dup().detach())
        try:
            deliver_challenge(made, secret)
            answer_challenge(made, secret)
            rank = made.recv()
        except (AuthenticationError, EOFError, OSError): return made.close()
        _set_read_timeout(one, 0)
    connected.put((rank, made))


def _set_read_timeout(one: socket.socket, seconds: float) -> None:
    """How long a read of this socket may take; 0 is any time. (Python's own timeouts are those of its
    objects.)"""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(seconds), 0))
