"""What a program has done with the emulated GPU: its memory, modules, streams and launches.

Protocol: handlers (calls_*.py) take a `Session` first. Work is done in the order of the calls, each before
its call returns, whatever stream it is in; a stream's `seconds` add up the predicted times of its launches.
"""
from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from tinygrad_nv.host.errors import CudaError, Status
from tinygrad_nv.host.gpus import HostGPU
from tinygrad_nv.host.launches import Launch, LaunchReport, Options, launched
from tinygrad_nv.host.memory import Kind, Memory
from tinygrad_nv.host.modules import Kernel, Module
from tinygrad_nv.host.wire import Wire
from tinygrad_nv.ptx.emulator import Buffer, Emulator
from tinygrad_nv.ptx.timing.model import Timing

LEGACY, PER_THREAD = 1, 2       # cudaStreamLegacy, cudaStreamPerThread
FIRST_HANDLE, HANDLE_STEP = 0x7700_0000_1000, 0x40  # look like pointers, and point to nothing


@dataclass(eq=False)
class Stream:
    """A stream, and how many predicted seconds its launches have taken."""
    handle: int
    flags: int = 0
    priority: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class Event:
    """An event: when its stream was there, in predicted seconds or by the host's clock; None: never
    recorded."""
    flags: int = 0
    at: float | None = None


@dataclass
class Thread:
    """What each thread of the program has of its own."""
    error: Status = Status.SUCCESS
    configurations: list[tuple] = field(default_factory=list)     # of <<<…>>>


class Results(Protocol):
    """Where a session says what came of the program."""
    launches: list[LaunchReport]
    refused: list[str]
    notes: list[str]


class Session:
    """The state of one process of the program."""

    def __init__(self, wire: Wire, gpu: HostGPU, memory: Memory, emulator: Emulator, options: Options,
                 results: Results) -> None:
        self.wire, self.gpu, self.memory, self.emulator, self.options = wire, gpu, memory, emulator, options
        self.results = results
        self.timings: dict[object, Timing] = {}
        self.modules: dict[int, Module] = {}
        self.functions: dict[int, tuple[int, str]] = {}     # of the host: module and name
        self.symbols: dict[int, tuple[int, str]] = {}
        self.kernels: dict[int, Kernel] = {}                # by handles
        self.objects: dict[int, object] = {}                # streams, events and so on, by handles
        self.streams = {0: Stream(0), LEGACY: Stream(LEGACY), PER_THREAD: Stream(PER_THREAD)}
        self.threads: dict[int, Thread] = {}
        self.texts: dict[str, int] = {}
        self.thread = Thread()
        self.sticky = Status.SUCCESS
        self.next_handle = FIRST_HANDLE
        self.device = 0

    # handles

    def handle(self, what: object) -> int:
        """A handle for an object."""
        self.next_handle += HANDLE_STEP
        self.objects[self.next_handle] = what
        return self.next_handle

    def object(self, handle: int, kind: type) -> object:
        """What a handle stands for. Raises `CudaError` for another's."""
        found = self.objects.get(handle)
        if not isinstance(found, kind): raise CudaError(Status.INVALID_RESOURCE_HANDLE)
        return found

    def stream(self, handle: int) -> Stream:
        if handle in self.streams: return self.streams[handle]
        found = self.object(handle, Stream)
        assert isinstance(found, Stream)
        return found

    def event(self, handle: int) -> Event:
        found = self.object(handle, Event)
        assert isinstance(found, Event)
        return found

    def text(self, text: str) -> int:
        """The address of a string in the program's memory, which stays."""
        if text not in self.texts:
            data = text.encode() + b"\0"
            made = self.memory.alloc(len(data), Kind.HOST, self.wire)
            made.buffer.data[:] = list(data)
            self.texts[text] = made.address
        return self.texts[text]

    # kernels

    def kernel(self, handle: int) -> Kernel:
        """The kernel of a host function, or of a handle. Raises `CudaError`, and `NVError` for device code
        that cannot be run."""
        if handle not in self.kernels:
            if handle not in self.functions: raise CudaError(Status.INVALID_DEVICE_FUNCTION)
            module, name = self.functions[handle]
            self.kernels[handle] = self.modules[module].kernel(name)
        return self.kernels[handle]

    def variable(self, symbol: int) -> Buffer:
        """The memory of a variable of the host's that stands for one of the device."""
        if symbol not in self.symbols: raise CudaError(Status.INVALID_SYMBOL)
        module, name = self.symbols[symbol]
        found = self.emulator.variables(self.modules[module].text)
        if name not in found: raise CudaError(Status.INVALID_SYMBOL)
        return found[name]

    # work

    def launch(self, launch: Launch, stream: Stream) -> None:
        """Raises `CudaError`."""
        report = launched(self.emulator, launch, self.options, self.gpu.key, self.timings)
        self.results.launches.append(report)
        if report.timing is not None: stream.seconds += report.timing.seconds
        self.sticky = report.status     # told by the next call that waits

    def now(self, stream: Stream) -> float:
        """When what a stream holds is done."""
        return stream.seconds if self.options.time else time.perf_counter()
