"""Garbage collection while the command starts.

Protocol: `seldom` is called before the command imports its 900 modules: collections meanwhile take 6 % of its
start, and find nothing. `as_usual` is called when it is ready to work: Tensors in cycles are not to wait.
"""
from __future__ import annotations

import gc

USUAL = gc.get_threshold()
STARTING = 50_000, 20, 20


def seldom() -> None: gc.set_threshold(*STARTING)


def as_usual() -> None: gc.set_threshold(*USUAL)
