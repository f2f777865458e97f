"""Garbage collection while the command starts, and where much is made of which nothing is in cycles.

Protocol: `seldom` is called before the command imports its 900 modules: collections meanwhile take 6 % of its
start, and find nothing. `as_usual` is called when it is ready to work: Tensors in cycles are not to wait.
"""
from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

USUAL = gc.get_threshold()
STARTING = 50_000, 20, 20
_lock, _pauses, _collects = threading.Lock(), 0, True


def seldom() -> None: gc.set_threshold(*STARTING)


def as_usual() -> None: gc.set_threshold(*USUAL)


@contextlib.contextmanager
def pause() -> Iterator[None]:
    """Begins no collection in any thread. While 10^5 objects are made that all stay, collections take up to
    two thirds of the time, and hold up all threads. Of several pauses the last one ends it."""
    global _pauses, _collects
    with _lock:
        if not _pauses:
            _collects = gc.isenabled()
            gc.disable()
        _pauses += 1
    try: yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _collects: gc.enable()
