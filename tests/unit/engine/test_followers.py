"""The rank that leads a replica, and the connections of the others."""
from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client, Connection
from queue import Queue
from typing import Any, cast

import pytest

from tinygrad_nv.dist.ranks import Ranks
from tinygrad_nv.engine.executor import connections
from tinygrad_nv.engine.executor.followers import Followers
from tinygrad_nv.engine.executor.plan import device_of
from tinygrad_nv.errors import DistError, NVError, WeightError


@dataclass
class World:
    """Of ranks that are threads; `told` gets what each says."""
    rank: int = 0
    size: int = 2
    told: dict[int, Queue[bytes]] = field(default_factory=lambda: {rank: Queue() for rank in range(8)})

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.rank, self.size, self.rank, self.size, 0, "127.0.0.1", 1, "launch")

    def secret(self) -> bytes: return b"of the ranks"

    def exchange(self, name: str, own: bytes) -> list[bytes]:
        self.told[self.rank].put(own)
        found = []
        for rank in range(self.size):
            found.append(self.told[rank].get(timeout=10))
            self.told[rank].put(found[-1])
        return found


def test_other_processes_are_no_ranks() -> None:
    """Those that know no secret, and those that say nothing, which no rank waits for."""
    world = World()
    with ThreadPoolExecutor(1) as waits:
        world.told[1].put(b"")
        found = waits.submit(connections.connect, cast(Any, world), 2)
        host, port = world.told[0].get(timeout=10).decode().split()
        world.told[0].put(f"{host} {port}".encode())
        with socket.create_connection((host, int(port))):
            socket.create_connection((host, int(port))).close()
            with pytest.raises(AuthenticationError): Client((host, int(port)), authkey=b"another")
            with Client((host, int(port)), authkey=world.secret()) as rank:
                rank.send(1)
                own = found.result(timeout=connections.HELLO_S / 2).followers[1]
                own.send("open")
                assert rank.recv() == "open"
                own.close()


def test_ranks_of_replicas_meet() -> None:
    """Each with the rank that leads it, and those with rank 0."""
    worlds = [World(rank, 6) for rank in range(6)]
    for each in worlds: each.told = worlds[0].told
    with ThreadPoolExecutor(6) as ranks:
        found = [*ranks.map(lambda world: connections.connect(cast(Any, world), 3), worlds)]
    assert [(list(each.followers), list(each.leaders)) for each in found] == [
        ([1, 2], [3]), ([], []), ([], []), ([4, 5], []), ([], []), ([], [])]
    for leads, rank in ((0, 1), (0, 2), (0, 3), (3, 4), (3, 5)):
        every = found[leads].followers | found[leads].leaders
        every[rank].send(rank)
        assert (up := found[rank].up) is not None
        assert up.recv() == rank


@pytest.fixture
def two() -> tuple[Followers, list[Connection], list[DistError]]:
    """Followers 1 and 2, their ends, and what interrupted this rank."""
    (own1, first), (own2, second) = Pipe(), Pipe()
    interrupted: list[DistError] = []
    return Followers({1: own1, 2: own2}, interrupted.append), [first, second], interrupted


def answers(end: Connection, fine: bool, answer: object) -> Callable[[], None]:
    def run() -> None:
        assert end.recv() == ("open", (7,))
        end.send((fine, answer))
    return run


def test_what_ranks_do_together(two: tuple[Followers, list[Connection], list[DistError]]) -> None:
    followers, ends, _ = two
    for number, end in enumerate(ends): threading.Thread(target=answers(end, True, number)).start()
    assert followers.together(lambda: "own", "open", 7) == ("own", [0, 1])


@pytest.mark.parametrize("rank", [1, 2])
def test_an_error_of_another_rank_ends_what_this_one_waits_for(
        two: tuple[Followers, list[Connection], list[DistError]], rank: int) -> None:
    """At once, though the other one does not answer, and this rank waits for it, too."""
    followers, ends, interrupted = two
    error = WeightError("a tensor is missing", "all", "download it")
    threading.Thread(target=answers(ends[rank - 1], False, error)).start()
    waits = threading.Event()
    followers.interrupt = lambda why: (interrupted.append(why), waits.set())[0]

    def task() -> None:
        assert waits.wait(10)
        raise interrupted[0]
    with pytest.raises(WeightError, match=f"rank {rank}: a tensor is missing\n  expected: all"):
        followers.together(task, "open", 7)
    assert interrupted[0].found == f"rank {rank}: a tensor is missing"


def test_an_error_of_this_rank_waits_for_no_other(
        two: tuple[Followers, list[Connection], list[DistError]]) -> None:
    followers, _, interrupted = two
    def task() -> None: raise MemoryError("no room")
    with pytest.raises(MemoryError): followers.together(task, "open", 7)
    assert [each.found for each in interrupted] == ["it ended with MemoryError: no room"]
    with pytest.raises(DistError, match="no room"): followers.tell("launch")


def test_a_rank_that_is_gone(two: tuple[Followers, list[Connection], list[DistError]]) -> None:
    followers, ends, _ = two
    ends[1].close()
    with pytest.raises(NVError, match="rank 2 has ended in the midst of its work"):
        followers.together(lambda: None, "open", 7)


@pytest.mark.parametrize(("device", "local", "visible", "wanted"), [
    ("CUDA", 1, None, "CUDA:1"), ("CUDA:2", 1, "0,1,2,3", "CUDA:3"), ("CUDA", 1, "1", "CUDA"),
    ("CPU", 1, None, "CPU"), ("EMU", 1, None, "EMU")])
def test_ranks_of_a_host_have_a_gpu_each(device: str, local: int, visible: str | None, wanted: str) -> None:
    assert device_of(cast(Any, World(local, 4)), device, visible) == wanted
