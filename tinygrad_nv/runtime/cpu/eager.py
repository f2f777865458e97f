"""Launches on the CPU outside graphs: the parts of a kernel run on all cores.

Protocol: `parallel(theirs, enabled)` is tinygrad's CPUProgram with another call. tinygrad 0.14 runs the
parts that it splits a kernel into for `core_id` one after the other; while `enabled()` they run on the
threads of pool.py, for kernels of ours and of tinygrad alike. A kernel of one part is launched by
tinygrad, as is all on systems other than Linux, and what runs through its queues (HCQ2=1).
"""
from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

from tinygrad_nv.runtime.cpu.arguments import check_arguments
from tinygrad_nv.runtime.cpu.threads import threads

_WORD = (1 << 64) - 1


def parallel(theirs: type, enabled: Callable[[], bool]) -> type:
    """The class to make programs of in place of `theirs`."""
    def call(self: Any, *bufs: Any, global_size: tuple[int, int, int] = (1, 1, 1),
             local_size: tuple[int, int, int] = (1, 1, 1), vals: tuple[int | None, ...] = (),
             wait: bool = False, timeout: int | None = None) -> float | None:
        check_arguments(self.name, words := len(bufs) + len(vals))
        core, parts = self.runtimevars.get("core_id"), global_size[0]
        if core is None or parts == 1 or self.lvp or sys.platform != "linux" or not enabled():
            return original(self, *bufs, global_size=global_size, local_size=local_size, vals=vals, wait=wait,
                            timeout=timeout)
        from tinygrad_nv.runtime.cpu.pool import pool
        begun = time.perf_counter()
        # a kernel of ours has core_id at -1, the last
        row = array("Q", [self.addr, parts, core % words, words, *(b.va_addr for b in bufs),
                          *((v or 0) & _WORD for v in vals)])
        pool(threads()).run_at(row.buffer_info()[0], 1, len(row), True)
        return time.perf_counter() - begun if wait else None

    original: Callable[..., float | None] = theirs.__call__
    return type(theirs.__name__, (theirs,), {"__call__": call, "__module__": theirs.__module__})
