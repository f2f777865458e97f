"""Threads for what requests make the server compute: large bodies, long texts, long answers.

Protocol: `await aside(size, task)` is `task()`, at once for small sizes and in a thread for others. There are
two threads, one of them for sizes from `LARGE` on, so that a long text waits for those before it and holds up
no other request. `await apart(task)` is `task()` in a third one, for templates that may take long. A task
whose caller was cancelled (its client has disconnected) does not begin, or ends at its next `checkpoint()`.
The threads are daemons: the process ends without waiting for them.

While one of them runs, Python switches between threads every `SWITCH_S`, so that the event loop and the
engine wait so long at most. What runs longer inside a library must release the interpreter's lock.
"""
from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
INLINE = 4096           # characters that are tokenized in the event loop: about 5 ms at most
INLINE_BYTES = 32 << 10     # of a body that is read in the event loop: about 5 ms at most
LARGE = 256 << 10       # from so many characters or bytes on, a task runs in the thread for large ones
SWITCH_S = 0.0005       # sys.setswitchinterval while a thread is busy; Python's own is 5 ms


class Abandoned(Exception):
    """The task's caller is gone."""


class Stop:
    """Whether the caller of a task is gone."""
    asked = False


_STOP: contextvars.ContextVar[Stop] = contextvars.ContextVar("stop")
_busy, _lock, _usual_s = 0, threading.Lock(), sys.getswitchinterval()


def checkpoint() -> None:
    """Ends the task if its caller is gone. For loops over texts."""
    if (stop := _STOP.get(None)) is not None and stop.asked: raise Abandoned


class Worker:
    """A thread that runs tasks one after the other; it starts with the first."""

    def __init__(self, name: str) -> None:
        self.name, self.tasks = name, queue.SimpleQueue[Callable[[], None]]()
        self.thread: threading.Thread | None = None
        self.asked: dict[Future[Any], Stop] = {}    # by the event loop, and not done

    async def run(self, task: Callable[[], T]) -> T:
        """The task's result."""
        done, stop = Future[T](), Stop()
        context = contextvars.copy_context()
        context.run(_STOP.set, stop)

        def work() -> None:
            if stop.asked: return
            with contextlib.suppress(InvalidStateError):    # `end` was first, or the caller has left
                try: result = context.run(task)
                except BaseException as error: done.set_exception(error)
                else: done.set_result(result)
        self._start()
        self.asked[done] = stop
        self.tasks.put(work)
        try: return await asyncio.wrap_future(done)
        finally:
            stop.asked = True
            del self.asked[done]

    def end(self, error: Exception) -> None:
        """Raises an error in all that wait for a task, which ends at its next checkpoint."""
        for done, stop in self.asked.items():
            stop.asked = True
            with contextlib.suppress(InvalidStateError): done.set_exception(error)

    def _start(self) -> None:
        with _lock:
            if self.thread is not None: return
            self.thread = threading.Thread(target=self._loop, name=self.name, daemon=True)
            self.thread.start()

    def _loop(self) -> None:
        while True:
            work = self.tasks.get()
            with _often_switched(): work()
            del work    # and what it holds, before the next one comes


SMALL_WORKER, LARGE_WORKER, TEMPLATE_WORKER = WORKERS = \
    Worker("texts"), Worker("large texts"), Worker("templates")


async def aside(size: int, task: Callable[[], T], inline: int = INLINE) -> T:
    """See above. `inline`: the largest size that is done at once."""
    if size <= inline: return task()
    return await (LARGE_WORKER if size >= LARGE else SMALL_WORKER).run(task)


async def apart(task: Callable[[], T]) -> T:
    """See above."""
    return await TEMPLATE_WORKER.run(task)


def end_all(error: Exception) -> None:
    """Raises an error in all that wait for a task."""
    for worker in WORKERS: worker.end(error)


@contextmanager
def _often_switched() -> Iterator[None]:
    global _busy
    with _lock:
        _busy += 1
        sys.setswitchinterval(SWITCH_S)
    try: yield
    finally:
        with _lock:
            _busy -= 1
            if not _busy: sys.setswitchinterval(_usual_s)
