"""A fork of this process that captures steps, so that this one captures others, or serves, meanwhile.

Protocol: `NumberQueue(count)` are numbers of steps, which both processes take from. `StepProcess.start`
forks; the fork takes numbers until none is left, then goes through `low_priority` with the lowest priority,
and sends what `capture(number)` returns for each. `receive` gives these in turn, and None when there are no
more: the fork is done, or died. `close` ends it. It also ends when the thread that started it does.

The fork has the memory of this process as it is: weights are shared, and nothing is loaded twice. It closes
the sockets that it inherits, so that a port is free when this process has ended.
"""
from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tinygrad.uop.ops import UOp

LOWEST_PRIORITY = 19
PR_SET_PDEATHSIG = 1    # prctl(2)
SIZE = struct.Struct("<Q")      # of a message: bytes that follow


@dataclass(frozen=True)
class CapturedJob:
    """A captured step: its number, its schedule (None of one that cannot be kept), and how many programs were
    compiled for it."""
    number: int
    step: UOp | None
    compiled: int


class NumberQueue:
    """The numbers below `count`, each of which one of the processes takes. (In a pipe: a read of it takes
    what no other gets.)"""
    WORD = struct.Struct("<I")

    def __init__(self, count: int) -> None:
        self._from, into = os.pipe()
        os.write(into, b"".join(map(self.WORD.pack, range(count))))
        os.close(into)

    def take(self) -> int | None:
        """The next number; None if there is none."""
        word = os.read(self._from, self.WORD.size)
        return self.WORD.unpack(word)[0] if word else None

    def close(self) -> None:
        """Closes this process's end."""
        os.close(self._from)


class StepProcess:
    """The fork, as the process that started it has it."""

    def __init__(self, pid: int, messages: int) -> None:
        self.pid, self._messages, self._lock = pid, os.fdopen(messages, "rb"), threading.Lock()

    @staticmethod
    def start(queue: NumberQueue, low_priority: Iterable[int],
              capture: Callable[[int], CapturedJob]) -> StepProcess | None:
        """Forks; None where the system has no forks, or no memory for one."""
        if sys.platform != "linux": return None
        messages, into = os.pipe()
        parent = os.getpid()
        try: pid = os.fork()
        except OSError:
            for each in (messages, into): os.close(each)
            return None
        if pid == 0: _run(parent, queue, low_priority, capture, into)
        os.close(into)
        return StepProcess(pid, messages)

    def receive(self) -> CapturedJob | None:
        """The next step; None if no more comes."""
        try:
            size, = SIZE.unpack(self._read(SIZE.size))
            # of a pipe that no other process has an end of: it has no name, and the fork inherits it
            made: CapturedJob = pickle.loads(self._read(size))
        except EOFError: return None
        return made

    def _read(self, size: int) -> bytes:
        if len(data := self._messages.read(size)) < size: raise EOFError
        return data

    def close(self) -> None:
        """Ends the fork."""
        with self._lock, contextlib.suppress(ProcessLookupError, ChildProcessError):
            if not self.pid: return
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


def _run(parent: int, queue: NumberQueue, low_priority: Iterable[int], capture: Callable[[int], CapturedJob],
         into: int) -> NoReturn:
    """Runs in the fork. It never returns: above it is the stack of the other process."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent: os._exit(status)
        signal.set_wakeup_fd(-1)
        for each in (signal.SIGINT, signal.SIGTERM): signal.signal(each, signal.SIG_DFL)
        gc.freeze()     # a collection writes to all objects, of pages that are shared
        _close_sockets()
        while (number := queue.take()) is not None: _send(into, _capture_job(capture, number))
        os.nice(LOWEST_PRIORITY)
        for number in low_priority: _send(into, _capture_job(capture, number))
        status = 0
    except (BrokenPipeError, KeyboardInterrupt): pass
    except BaseException: sys.excepthook(*sys.exc_info())
    finally: os._exit(status)


def _capture_job(capture: Callable[[int], CapturedJob], number: int) -> CapturedJob:
    """Captures a job."""
    try: return capture(number)
    except MemoryError: raise
    except Exception: return CapturedJob(number, None, 0)


def _close_sockets() -> None:
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(each.name)).st_mode): os.close(int(each.name))


def _send(into: int, made: CapturedJob) -> None:
    data = pickle.dumps(made, pickle.HIGHEST_PROTOCOL)
    view = memoryview(SIZE.pack(len(data)) + data)
    while view: view = view[os.write(into, view):]
