"""Our part of the CPU device: it compiles with the compiler that `toolchain` finds; while enabled, it has
graphs, runs kernels on all cores and has large buffers in huge pages.

Protocol: importing tinygrad_nv calls `install`, and `hooks.remove_cpu` undoes that.

The four programs of tinygrad's queues on the CPU are made when a queue is first used. Tinygrad 0.14 makes
them, by way of its code generator and the compiler, whenever the device is opened: a third of a second at
every start, four compilations at the first. Only HCQ2=1 runs them. `defer_program` is tinygrad's
`do_to_program` as its CPU module sees it, and returns a `Deferred` in place of a program; `deferring(theirs)`
is tinygrad's CPUProgram, which takes one and makes the program once an attribute of it is needed.

Outside graphs, the parts of a kernel run on all cores: `parallel(theirs, enabled)` is tinygrad's CPUProgram
with another call. tinygrad 0.14 runs the parts that it splits a kernel into for `core_id` one after the
other; while `enabled()` they run on the threads of pool.py, for kernels of ours and of tinygrad alike. A
kernel of one part is launched by tinygrad, as is all on systems other than Linux, and what runs through its
queues (HCQ2=1).

Large buffers lie in huge pages: `huge(theirs, enabled)` is tinygrad's CPUAllocator with another way to
allocate. tinygrad 0.14 maps buffers shared, as pages of 4 KB of the system's shared memory. While
`enabled()`, buffers from 2 MB up are private, begin at a multiple of 2 MB and ask for huge pages; where there
are none they have pages of 4 KB. Reading 256 MB with 2 threads (Zen 4, a virtual machine): shared 25.5 GB/s,
private 30.9, in huge pages 32.5; writing them for the first time takes 152, 108 and 29 ms. What a process
writes after a fork, its parent does not see. Source: Linux, Documentation/admin-guide/mm/transhuge.rst.
"""
from __future__ import annotations

import contextlib
import mmap
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinygrad.device import TinyELF
from tinygrad.helpers import Context, mv_address
from tinygrad.runtime.support.hcq import HCQBuffer, MMIOInterface
from tinygrad.uop.ops import UOp

from tinygrad_nv import hooks
from tinygrad_nv.runtime.cpu import clang
from tinygrad_nv.runtime.cpu.arguments import check_arguments
from tinygrad_nv.runtime.cpu.threads import threads

PAGE = 2 << 20
_WORD = (1 << 64) - 1


def huge(theirs: type, enabled: Callable[[], bool]) -> type:
    """The class to make allocators of in place of `theirs`."""
    def alloc(self: Any, size: int, options: Any) -> Any:
        if size < PAGE or options.external_ptr is not None or sys.platform != "linux" or not enabled():
            return original(self, size, options)
        memory = mmap.mmap(-1, size + PAGE, mmap.MAP_ANON | mmap.MAP_PRIVATE)
        # a kernel without huge pages
        with contextlib.suppress(OSError): memory.madvise(mmap.MADV_HUGEPAGE)
        address = -(-mv_address(memory) // PAGE) * PAGE
        view = MMIOInterface(address, size, fmt="B")
        return HCQBuffer(address, size, meta=memory, view=view, owner=self.dev)

    original: Callable[..., Any] = vars(theirs)["_alloc"]
    return type(theirs.__name__, (theirs,), {"_alloc": alloc, "__module__": theirs.__module__})


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


@dataclass(frozen=True)
class Deferred:
    """A program that is compiled when it is first needed."""
    make: Callable[[UOp, Any], UOp]
    sink: UOp
    renderer: Any

    def to_elf(self) -> Deferred: return self

    def make_program(self) -> TinyELF:
        """Returns the program, as tinygrad makes it when it opens the device."""
        with Context(EMULATED_DTYPES="", TRACK_MATCH_STATS=0):
            done: TinyELF = self.make(self.sink, self.renderer).to_elf()
        return done


def defer_program(theirs: Callable[[UOp, Any], UOp]) -> Callable[[UOp, Any], Deferred]:
    """Returns what takes the place of `do_to_program`."""
    return lambda sink, renderer: Deferred(theirs, sink, renderer)


def deferring(theirs: type) -> type:
    """The class to make programs of in place of `theirs`."""
    make: Callable[..., None] = vars(theirs)["__init__"]

    def init(self: Any, dev: Any, obj: TinyELF | Deferred) -> None:
        if isinstance(obj, Deferred): self.deferred = dev, obj
        else: make(self, dev, obj)

    def attribute(self: Any, name: str) -> Any:
        if (waiting := vars(self).pop("deferred", None)) is None: raise AttributeError(name)
        dev, obj = waiting
        make(self, dev, obj.make_program())
        return getattr(self, name)
    members = {"__init__": init, "__getattr__": attribute, "__module__": theirs.__module__}
    return type(theirs.__name__, (theirs,), members)


def install() -> None:
    """Lets CPU devices opened from now on be ours."""
    hooks.install_cpu({"ClangRenderer": lambda theirs, enabled: clang.ClangRenderer, "CPUProgram": _program,
                       "do_to_program": lambda theirs, enabled: defer_program(theirs),
                       "CPUAllocator": huge}, _graph)


def _program(theirs: type, enabled: Callable[[], bool]) -> type:
    return parallel(deferring(theirs), enabled)


def _graph() -> type[Any]:
    from tinygrad_nv.runtime.cpu.graph import CPUGraph  # numpy is loaded only for a capture
    return CPUGraph
