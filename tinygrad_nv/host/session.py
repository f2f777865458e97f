"""The state of one process of a program, which handlers (calls_*.py) share.

Protocol: a handler takes a `Session` first. Handles and addresses are the program's integers: `stream`,
`kernel` and the others give what they stand for, or raise `CudaError`.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from tinygrad_nv.host.device import Device
from tinygrad_nv.host.errors import CudaError, Status
from tinygrad_nv.host.memory import Allocation, Kind
from tinygrad_nv.host.modules import Kernel, Module
from tinygrad_nv.host.streams import LEGACY, PER_THREAD, Event, Stream, Streams

FIRST_HANDLE, HANDLE_STEP = 0x7700_0000_1000, 0x40  # look like pointers, and point to nothing
Kept = TypeVar("Kept")


@dataclass
class Thread:
    """State that each thread of the program has of its own. `configurations`: of <<<…>>>; `contexts`:
    pushed."""
    number: int
    error: Status = Status.SUCCESS
    configurations: list[tuple[tuple[int, int, int], tuple[int, int, int], int, int]] = field(
        default_factory=list)
    contexts: list[int] = field(default_factory=list)


class Session:
    """`name`: the function that is being served; `per_thread`: it takes stream 0 for its thread's."""

    def __init__(self, device: Device) -> None:
        self.device, self.wire, self.gpu, self.memory = device, device.wire, device.gpu, device.memory
        self.streams = Streams(device)
        self.modules: dict[int, Module] = {}
        self.functions: dict[int, tuple[int, str]] = {}     # of the host: module and name
        self.symbols: dict[int, tuple[int, str]] = {}
        # of modules: pointer, name and size of managed variables
        self.managed: dict[int, list[tuple[int, str, int]]] = {}
        self.kernels: dict[int, Kernel] = {}                # by handles
        self.objects: dict[int, object] = {}
        self.handles: dict[object, int] = {}
        self.texts: dict[str, int] = {}
        self.limits: dict[int, int] = {}
        self.threads: dict[int, Thread] = {}
        self.thread = Thread(0)
        self.name, self.per_thread = "", False
        self.next_handle = FIRST_HANDLE

    # **** handles ****

    def handle(self, what: object) -> int:
        """A handle for an object, the same each time."""
        if what not in self.handles:
            self.next_handle += HANDLE_STEP
            self.objects[self.next_handle], self.handles[what] = what, self.next_handle
        return self.handles[what]

    def object(self, handle: int, kind: type[Kept]) -> Kept:
        """Returns what a handle stands for. Raises `CudaError` for another's."""
        found = self.objects.get(handle)
        if not isinstance(found, kind):
            raise CudaError(Status.INVALID_RESOURCE_HANDLE, f"{handle:#x} is no {kind.__name__.lower()}")
        return found

    def drop(self, handle: int, kind: type[Kept]) -> Kept:
        """Forgets a handle, and returns what it stood for."""
        found = self.object(handle, kind)
        del self.objects[handle], self.handles[found]
        return found

    def stream(self, handle: int) -> Stream:
        if handle == PER_THREAD or (handle == 0 and self.per_thread):
            return self.streams.of_thread(self.thread.number)
        return self.streams.default if handle in (0, LEGACY) else self.object(handle, Stream)

    def event(self, handle: int) -> Event: return self.object(handle, Event)

    def text(self, text: str) -> int:
        """The address of a string in the program's memory, which stays."""
        if text not in self.texts:
            data = text.encode() + b"\0"
            made = self.memory.alloc(len(data), Kind.HOST)
            made.buffer.data[:] = list(data)
            self.texts[text] = made.address
        return self.texts[text]

    def put(self, pointer: int, *values: int, size: int = 8) -> None:
        """Writes integers where a pointer argument points. Raises `CudaError` for a null pointer."""
        if not pointer: raise CudaError(Status.INVALID_VALUE, "a null pointer")
        most = (1 << 8 * size) - 1
        self.wire.write(pointer, b"".join((value & most).to_bytes(size, "little") for value in values))

    def fill_in(self, pointer: int, *values: int, size: int = 8) -> None:
        """The same, of a result that is not asked for with a null pointer."""
        if pointer: self.put(pointer, *values, size=size)

    # **** kernels and variables ****

    def manage(self, handle: int) -> None:
        """The managed variables of a module get memory that the host has, too, and its pointers to them."""
        if not (asked := self.managed.pop(handle, [])): return
        places = {name: self.memory.alloc(nbytes, Kind.MANAGED).buffer for _, name, nbytes in asked}
        self.device.emulator.variables(self.modules[handle].text, places)
        for pointer, name, _ in asked: self.put(pointer, places[name].ptr)

    def kernel(self, handle: int) -> Kernel:
        """The kernel of a host function, or of a handle. Raises `CudaError`, and `NVError` for device code
        that cannot be run."""
        if (found := self.kernels.get(handle)) is not None: return found
        if isinstance(known := self.objects.get(handle), Kernel): return known
        if handle not in self.functions:
            raise CudaError(Status.INVALID_DEVICE_FUNCTION, f"{handle:#x} is no kernel of the program")
        module, name = self.functions[handle]
        self.manage(module)
        found = self.kernels[handle] = self.modules[module].kernel(name)
        return found

    def variable(self, module: Module, name: str) -> Allocation:
        """A variable of a module. Raises `CudaError` where it has none of the name."""
        buffers = self.device.emulator.variables(module.text)
        if name not in buffers: raise CudaError(Status.SYMBOL_NOT_FOUND, f"the module has no variable {name}")
        buffer = buffers[name]
        known = self.memory.by_address.get(buffer.ptr)
        return known or self.memory.enter(Allocation(buffer.ptr, buffer.nbytes, Kind.DEVICE, buffer,
                                                     own=False))

    def symbol(self, symbol: int) -> Allocation:
        """The variable that one of the host's stands for."""
        if symbol not in self.symbols:
            raise CudaError(Status.INVALID_SYMBOL, f"{symbol:#x} is no variable of the device")
        module, name = self.symbols[symbol]
        self.manage(module)
        return self.variable(self.modules[module], name)
