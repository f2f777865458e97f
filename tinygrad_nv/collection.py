"""Garbage collection while the command starts, and where much is made of which nothing is in cycles.

Protocol: `seldom` is called before the command imports its 900 modules: collections meanwhile take 6 % of its
start, and find nothing. `as_usual` is called when it is ready to work: Tensors in cycles are not to wait.
"""
from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

USUAL = gc.get_threshold()
STARTING = 50_000, 20, 20


def seldom() -> None: gc.set_threshold(*STARTING)


def as_usual() -> None: gc.set_threshold(*USUAL)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Lets no collection begin: they take up to two thirds of the time in which 10^5 objects are made."""
    enabled = gc.isenabled()
    gc.disable()
    try: yield
    finally:
        if enabled: gc.enable()
