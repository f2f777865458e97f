"""Tasks for processes that compile, some of which kill the process that runs them. Like the module of a
program whose functions kernels call, this one imports tinygrad_nv."""
from __future__ import annotations

import multiprocessing
import os
import signal
import time

from tinygrad_nv import Tensor, explain

HERE, KILLS, RAISES = range(3)      # what the second part of a task says


def work(task: tuple[int, int]) -> tuple[int, bool]:
    """Returns a task's number, and whether this is a process of a pool."""
    number, what = task
    inside = multiprocessing.parent_process() is not None
    if what == RAISES: raise ValueError(number)
    if what == KILLS and inside: os.kill(os.getpid(), signal.SIGKILL)
    assert callable(explain)
    assert hasattr(Tensor, "realize")
    time.sleep(0.01)
    return number, inside
