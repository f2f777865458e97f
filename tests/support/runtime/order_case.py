"""Work whose order matters: buffers of N words, kernels over them, and what the device says of it."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tinygrad_nv.errors import KernelError
from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.ptx.builder.values import Value
from tinygrad_nv.runtime.driver import Event, Launch, Stream, pointer
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver

N = 64
NBYTES = 4 * N


def kernel(name: str, write: Callable[[Kernel], None], threads: int = N) -> bytes:
    """PTX of a kernel, for blocks of up to so many threads."""
    k = Kernel(name, arch="sm_90a", threads=threads)
    write(k)
    return k.ptx().replace(".reqntid", ".maxntid").encode()


def mine(k: Kernel, base: Value) -> Value:
    """The address of the thread's word."""
    return base + k.tid.x.to("u64") * 4


def move(k: Kernel) -> None:
    """out[i] = in[i] + 1."""
    out, source = k.pointer("out"), k.pointer("source")
    (value,) = k.ld("global", "u32", mine(k, source).at())
    k.st("global", "u32", mine(k, out).at(), value + 1)


def tally(k: Kernel) -> None:
    """out[i] += 1, atomically."""
    k.emit("red.global.add.u32", mine(k, k.pointer("out")).at(), 1)


def pick(k: Kernel) -> None:
    """out[i] = in[where]."""
    out, source, where = (k.pointer(name) for name in ("out", "source", "where"))
    (index,) = k.ld("global", "u32", where.at())
    (value,) = k.ld("global", "u32", (source + index.to("u64") * 4).at())
    k.st("global", "u32", mine(k, out).at(), value)


KERNELS = {each.__name__: each for each in (move, tally, pick)}


class Bench:
    """A device with two streams besides stream 0, and buffers that are written."""

    def __init__(self, check: bool = True) -> None:
        self.gpu = EmulatedDriver(check=check)
        self.functions = {name: self.gpu.load(kernel(name, write)).function(name)
                          for name, write in KERNELS.items()}
        self.s, self.t = self.gpu.stream(), self.gpu.stream()
        self.a, self.b, self.c = (self.buffer(np.arange(N)) for _ in "abc")
        self.gpu.synchronize()

    def buffer(self, values: np.ndarray) -> int:
        address = self.gpu.alloc(4 * len(values))
        self.gpu.copy_in(address, memoryview(values.astype("<u4")).cast("B"))
        return address

    def launch(self, name: str, *addresses: int, threads: int = N) -> Launch:
        return Launch(self.functions[name], (1, 1, 1), (threads, 1, 1), tuple(map(pointer, addresses)))

    def move(self, out: int, source: int, threads: int = N) -> Launch:
        return self.launch("move", out, source, threads=threads)

    def event(self, stream: Stream | None = None) -> Event:
        """Recorded in a stream."""
        event = self.gpu.event()
        self.gpu.record(event, stream)
        return event

    def then(self, before: Stream, after: Stream) -> None:
        """What comes to one stream follows what another holds."""
        self.gpu.wait(self.event(before), after)

    def read(self, address: int, stream: Stream | None = None, words: int = N) -> np.ndarray:
        out = np.zeros(words, np.uint32)
        self.gpu.copy_out(memoryview(out).cast("B"), address, stream)
        return out

    def said(self, *streams: Stream) -> str:
        """What these streams, or all, have found by now; empty: nothing."""
        try:
            for stream in streams or (None,): self.gpu.synchronize(stream)
        except KernelError as error: return error.found
        return ""
