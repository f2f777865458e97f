"""The number of threads to compute with.

Protocol: `threads()` is what kernels are made for: tinygrad's NUM_CPU_THREADS where it is set, else no more
than there are cores for (available.py); tinygrad's own default knows neither cgroup 1 nor groups below the
root. `limit(n)` is for a process that shares its cores with others, unless the user set NUM_CPU_THREADS.
"""
from __future__ import annotations

import os

from tinygrad.helpers import NUM_CPU_THREADS

from tinygrad_nv.runtime.cpu.available import available

_DEFAULT = int(NUM_CPU_THREADS.value)
_limited = False


def threads() -> int:
    """How many threads kernels are made for now."""
    asked = max(1, int(NUM_CPU_THREADS.value))
    return asked if explicit() else min(asked, available().threads)


def explicit() -> bool:
    """Whether NUM_CPU_THREADS is set."""
    return "NUM_CPU_THREADS" in os.environ or int(NUM_CPU_THREADS.value) != _DEFAULT


def limit(number: int) -> None:
    """No more threads than that from now on, in processes that this one starts, too."""
    global _limited
    if explicit(): return
    _limited = True
    NUM_CPU_THREADS.value = number
    os.environ["NUM_CPU_THREADS"] = str(number)
    available.cache_clear()


def unlimit() -> None:
    """Undoes `limit`, if it did something."""
    global _limited
    if not _limited: return
    _limited, NUM_CPU_THREADS.value = False, _DEFAULT
    os.environ.pop("NUM_CPU_THREADS", None)
    available.cache_clear()
