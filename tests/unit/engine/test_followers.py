"""Rank 0 and the connections of other ranks."""
from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from queue import Queue
from typing import Any, cast

import pytest

from tinygrad_nv.dist.ranks import Ranks
from tinygrad_nv.engine.executor import followers
from tinygrad_nv.engine.executor.plan import device_of


@dataclass
class World:
    """Of two ranks, of which this is rank 0; `told` gets what it says."""
    size: int = 2
    ranks: Ranks = field(default_factory=lambda: Ranks(0, 2, 0, 2, 0, "127.0.0.1", 1, "launch"))
    told: Queue[bytes] = field(default_factory=Queue)

    def secret(self) -> bytes: return b"of the ranks"

    def exchange(self, name: str, own: bytes) -> list[bytes]:
        self.told.put(own)
        return [own, b""]


def test_other_processes_are_no_ranks() -> None:
    world = World()
    with ThreadPoolExecutor(1) as waits:
        found = waits.submit(followers._connections, cast(Any, world))
        host, port = world.told.get(timeout=10).decode().split()
        socket.create_connection((host, int(port))).close()
        with pytest.raises(AuthenticationError): Client((host, int(port)), authkey=b"another")
        with Client((host, int(port)), authkey=world.secret()) as rank:
            rank.send(1)
            own, = found.result(timeout=10)
            own.send("open")
            assert rank.recv() == "open"
            own.close()


@pytest.mark.parametrize(("device", "local", "visible", "wanted"), [
    ("CUDA", 1, None, "CUDA:1"), ("CUDA:2", 1, "0,1,2,3", "CUDA:3"), ("CUDA", 1, "1", "CUDA"),
    ("CPU", 1, None, "CPU"), ("EMU", 1, None, "EMU")])
def test_ranks_of_a_host_have_a_gpu_each(device: str, local: int, visible: str | None, wanted: str) -> None:
    world = World(ranks=Ranks(local, 4, local, 4, 0, "127.0.0.1", 1, "launch"))
    assert device_of(cast(Any, world), device, visible) == wanted
