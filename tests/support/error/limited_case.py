"""A test that hostile input must not take beyond some address space and processor time."""
from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def limit_process(nbytes: int, seconds: float) -> Iterator[None]:
    """Fails for more processor time; more memory than the process has and `nbytes` raises MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, limits[1]))
    started = time.process_time()
    try: yield
    finally: resource.setrlimit(resource.RLIMIT_AS, limits)
    assert time.process_time() - started < seconds
