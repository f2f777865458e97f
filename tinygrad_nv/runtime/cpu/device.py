"""Our part of the CPU device: it compiles with the compiler that `toolchain` finds; while enabled, it has
graphs, runs kernels on all cores and has large buffers in huge pages.

Protocol: importing tinygrad_nv calls `install`, and `hooks.remove_cpu` undoes that.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinygrad_nv import hooks
from tinygrad_nv.runtime.cpu import clang
from tinygrad_nv.runtime.cpu import eager as cpu_eager
from tinygrad_nv.runtime.cpu import memory as cpu_memory
from tinygrad_nv.runtime.cpu import queue as cpu_queue


def install() -> None:
    """Lets CPU devices opened from now on be ours."""
    hooks.install_cpu({"ClangRenderer": lambda theirs, enabled: clang.ClangRenderer, "CPUProgram": _program,
                       "do_to_program": lambda theirs, enabled: cpu_queue.defer_program(theirs),
                       "CPUAllocator": cpu_memory.huge}, _graph)


def _program(theirs: type, enabled: Callable[[], bool]) -> type:
    return cpu_eager.parallel(cpu_queue.deferring(theirs), enabled)


def _graph() -> type[Any]:
    from tinygrad_nv.runtime.cpu.graph import CPUGraph  # numpy is loaded only for a capture
    return CPUGraph
