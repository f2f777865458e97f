"""A kernel for the CPU by itself: compiled, loaded and called on arrays, for tests and timings.

Protocol: `load(kernel)` compiles with the CPU device's compiler (its disk cache serves) and returns a
`LoadedKernel`, which is called with arrays in the order of the kernel's pointers, then its integers. Parts
run on the pool of pool.py, or one after the other in an order that is given.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from tinygrad import Device
from tinygrad.device import TinyELF

from tinygrad_nv.runtime.cpu.pool import ALONE, HEAD, pool
from tinygrad_nv.runtime.cpu.threads import threads as threads_to_use


class LoadableKernel(Protocol):
    """C, the name of its function, in how many parts it is called (`cpu.kernel.CPUKernel`)."""
    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def parts(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel in memory. `program` is tinygrad's, which keeps it there."""
    kernel: LoadableKernel
    program: Any
    device: str

    def __call__(self, *arguments: np.ndarray | int, order: Sequence[int] | None = None,
                 threads: int | None = None) -> None:
        """Runs all parts: on `threads` (default: all), or in `order` on this one."""
        words = [x.ctypes.data if isinstance(x, np.ndarray) else x % (1 << 64) for x in arguments]
        parts, core = self.kernel.parts, len(words) if self.kernel.parts > 1 else -1
        row = [self.program.addr, parts, core % (1 << 64), len(words) + (core >= 0), *words, 0]
        if order is None:
            count = threads_to_use() if threads is None else threads
            pool(count).run(np.array([row], np.uint64), parts > 1 and count > 1)
            return
        for part in order:
            rows = np.array([[row[0], 1, ALONE, *row[3:HEAD], *words, part]], np.uint64)
            pool(1).run(rows, False)


def load(kernel: LoadableKernel, device: str = "CPU") -> LoadedKernel:
    """Compiles and loads a kernel. Raises `ToolchainError` with the compiler's words."""
    opened = Device[device]
    binary = opened.renderer.compiler.compile_cached(kernel.source)
    made = opened.runtime(TinyELF(binary, kernel.name, opened.renderer.target, ()))
    return LoadedKernel(kernel, made, device)
