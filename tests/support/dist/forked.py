"""Ranks for tests that need no launcher: forks of the test's process, each with an emulated device."""
from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from tinygrad_nv.dist.transports import nccl
from tinygrad_nv.dist.transports.library import library
from tinygrad_nv.dist.transports.nccl import CollectiveCall, Communicator
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver

Program = Callable[["Rank"], Any]


class Rank:
    """A rank's device and communicator, with memory by name."""

    def __init__(self, rank: int, size: int, unique: bytes) -> None:
        self.rank, self.size, self.driver = rank, size, EmulatedDriver()
        self.comm = self.connected(unique)

    def connected(self, unique: bytes, timeout_s: float = 20) -> Communicator:
        """Meets the other ranks."""
        return nccl.connect(self.driver, self.rank, range(self.size), lambda _: unique, timeout_s)

    def placed(self, array: np.ndarray) -> int:
        """An array on the device."""
        address = self.driver.alloc(array.nbytes)
        self.driver.copy_in(address, memoryview(np.ascontiguousarray(array)).cast("B"))
        return address

    def read(self, address: int, like: np.ndarray) -> np.ndarray:
        """What is on the device now, of the shape and dtype of `like`."""
        out = np.empty_like(like)
        self.driver.copy_out(memoryview(out).cast("B"), address)
        self.comm.finish()
        return out

    def ran(self, order: CollectiveCall, given: np.ndarray, like: np.ndarray) -> np.ndarray:
        """What a collective makes of an array."""
        out = self.driver.alloc(like.nbytes)
        self.driver.submit(self.comm.call(order, self.placed(given), out))
        return self.read(out, like)


def run(size: int, program: Program, timeout_s: float = 60) -> list[Any]:
    """What the program returns on each rank, or the words of what it raised; None of a rank that was
    killed."""
    library()   # loaded before forks
    unique = nccl.library(EmulatedDriver()).unique_id()
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    started = [context.Process(target=_rank, args=(rank, size, unique, program, pipes[rank][1]))
               for rank in range(size)]
    for each in started: each.start()
    for _, end in pipes: end.close()
    made: list[Any] = [None] * size
    left = {begin: rank for rank, (begin, _) in enumerate(pipes)}
    try:
        while left:
            ready = wait(list(left), timeout_s)
            assert ready, f"ranks {sorted(left.values())} did not end within {timeout_s} s"
            for begin in ready:
                assert isinstance(begin, Connection)
                rank = left.pop(begin)
                with contextlib.suppress(EOFError): made[rank] = begin.recv()
    finally:
        for each in started:
            if left: each.kill()
            each.join()
    return made


def _rank(rank: int, size: int, unique: bytes, program: Program, tell: Connection) -> None:
    try: said = program(Rank(rank, size, unique))
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, AssertionError): said += traceback.format_exc()
    tell.send(said)
    tell.close()
    os._exit(0)
