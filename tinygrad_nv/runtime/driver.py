"""The driver interface of a GPU: memory, modules, launches, streams, events, graphs, tensor maps.

Protocol. `Driver` is one device. Addresses are integers, device-wide, and may point inside an allocation.
Work (`Launch`, `Copy`, `Fill`, `Upload`, `Download`, `LibraryCall`) goes to a `Stream`: what is submitted to
one runs in that order; nothing orders two streams but an event that one records and the other waits for.
Stream 0 is there from the start and orders with no other. `submit` returns before the work is done; `copy_in`
has taken its bytes, and `copy_out` has delivered them, when it returns. The page-locked memory of an `Upload`
or a `Download` belongs to the work until an event after it has come to pass.

A launch with `pdl` may begin when the launch right before it in its stream lets it, or when that has ended;
it waits for the end, and for the memory that was written, with griddepcontrol.wait, which every such kernel
executes. In a graph that is an edge from the only node that it directly follows, if that is a launch;
otherwise, and behind copies and fills, it begins when all is done.

Arguments of a kernel are bytes, one entry for each parameter, as the kernel's parameter block holds them
(`pointer`, `integer` and `real` make them; a tensor map is its 128 bytes). `pack` lays them out.

Between `begin_capture` and `end_capture` a stream records instead of running. A stream that waits for an
event of a capture joins it, and must be waited for by the first stream before the capture ends. Graphs can
also be built from explicit nodes. An instantiated graph's nodes take new arguments and extents, never another
function or other edges.

What is wrong with a request is a `DriverError` at once. What a kernel did wrong is a `KernelError` at the
next call that waits for its stream: `synchronize`, `copy_out`, `wait_for`.
"""
from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from tinygrad_nv.errors import DriverError
from tinygrad_nv.ptx.gpcs import SIZES, Clusters
from tinygrad_nv.runtime.library_call import LibraryCall
from tinygrad_nv.tile.launch import MapArgument

Triple = tuple[int, int, int]
Swizzle = Literal["none", "32B", "64B", "128B"]
TENSOR_MAP_BYTES, TENSOR_MAP_ALIGN = 128, 64
PORTABLE_CLUSTER = 8    # CTAs that every GPU with clusters takes


# **** what is asked for ****

@dataclass(frozen=True)
class Properties:
    """A device: its compute capability as ptxas writes it, and its limits. Bytes and counts."""
    name: str
    arch: str                   # sm_90a
    sm_count: int
    shared_static_limit: int    # of a CTA without asking
    shared_limit: int           # of a CTA that asks
    shared_of_sm: int
    l2_bytes: int
    memory_bytes: int
    threads_of_sm: int = 2048
    threads_of_cta: int = 1024
    warp_size: int = 32
    persisting_l2_limit: int = 0    # of L2, what can be set aside
    window_limit: int = 0           # of a `Window`


@dataclass(frozen=True)
class Attributes:
    """A loaded function: static shared and local bytes, registers a thread, the largest block. `registers` is
    0 where the driver does not compile to registers."""
    static_smem: int
    local_bytes: int
    registers: int
    max_threads: int


@dataclass(frozen=True)
class Function:
    """A kernel of a loaded module. `handle` is the driver's own."""
    name: str
    attributes: Attributes
    handle: object = field(repr=False)


@dataclass(frozen=True)
class Window:
    """Memory whose lines a launch keeps in the part of L2 that is set aside: `hit_ratio` of them, chosen at
    random by the hardware; the others are treated as streaming. A window while no L2 is set aside is an error
    on the emulated device, and has no effect on a real one."""
    address: int
    nbytes: int
    hit_ratio: float = 1.0


@dataclass(frozen=True)
class Launch:
    """One launch. `grid` and `cluster` are in CTAs, `block` in threads. With `pdl` the kernel may begin
    before the one ahead of it in the stream has ended; it waits with griddepcontrol.wait. A kernel that other
    processes run, too, and that waits for theirs, is a collective: `given` is told as that of a
    `LibraryCall`, and before, without an event."""
    function: Function
    grid: Triple
    block: Triple
    args: tuple[bytes, ...] = ()
    dynamic_smem: int = 0
    cluster: Triple = (1, 1, 1)
    pdl: bool = False
    window: Window | None = None
    given: Callable[[Any, bool], None] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Copy:
    """Bytes from one place of the device to another; the two do not overlap."""
    target: int
    source: int
    nbytes: int


@dataclass(frozen=True)
class Fill:
    """Sets `nbytes` bytes to `value` (0 … 255)."""
    target: int
    value: int
    nbytes: int


class HostMemory(ABC):
    """Page-locked memory of the host."""
    view: memoryview    # of bytes, writable

    @abstractmethod
    def free(self) -> None:
        """Gives it back, once the work that was submitted with it is done."""


@dataclass(frozen=True)
class Upload:
    """Bytes of page-locked memory to the device, read when the work runs."""
    target: int
    source: HostMemory
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Download:
    """Bytes of the device to page-locked memory, there when the work has run."""
    target: HostMemory
    offset: int
    source: int
    nbytes: int


Work = Launch | Copy | Fill | Upload | Download | LibraryCall


@dataclass(frozen=True)
class TensorMapSpec:
    """The parameters of cuTensorMapEncodeTiled, innermost dimension first. `dtype` is a PTX element type (u8,
    u16, u32, s32, u64, s64, f16, bf16, f32, f64, tf32); `strides` are bytes, without the innermost one. With
    `lower` and `upper`, the corners in the spatial dimensions, those of cuTensorMapEncodeIm2col: `box` is
    channels and pixels then."""
    dtype: str
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()   # empty: all 1
    interleave: Literal["none", "16B", "32B"] = "none"
    swizzle: Swizzle = "none"
    l2_promotion: Literal["none", "64B", "128B", "256B"] = "none"
    fill: Literal["zero", "nan"] = "zero"
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()


def map_spec(argument: MapArgument, address: int, rows: int = 0) -> TensorMapSpec:
    """A kernel's tensor map over the buffer that begins at `address`, with `rows` in its dynamic dimension.

    L2 promotion is 128 bytes: a row of a box is at most so wide (the widest swizzle), and so is a line of L2.
    With less, the sectors of a line may come from memory by several requests; with 256 L2 fetches the columns
    of the next step before they are asked for. CUTLASS takes 128, DeepGEMM 256, fast.cu none. Not measured.
    """
    dims = tuple(rows if i == argument.dynamic else extent for i, extent in enumerate(argument.dims))
    return TensorMapSpec(argument.dtype, address + argument.offset_bytes, dims, argument.strides,
                         argument.box, argument.steps, swizzle=cast(Swizzle, argument.swizzle or "none"),
                         l2_promotion="128B", lower=argument.lower, upper=argument.upper)


# **** arguments ****

def pointer(address: int) -> bytes:
    """A .u64 parameter that holds an address."""
    return struct.pack("<Q", address)


def integer(value: int, nbytes: int = 4) -> bytes:
    """An integer parameter of `nbytes`; negative ones in two's complement, wider ones wrapped."""
    return (value % (1 << 8 * nbytes)).to_bytes(nbytes, "little")


def real(value: float, nbytes: int = 4) -> bytes:
    """A floating-point parameter of 2, 4 or 8 bytes."""
    return struct.pack({2: "<e", 4: "<f", 8: "<d"}[nbytes], value)


def pack(args: Sequence[bytes]) -> bytes:
    """The parameter block: each argument aligned to its size, tensor maps to 64 bytes."""
    block = bytearray()
    for argument in args:
        align = min(len(argument), TENSOR_MAP_ALIGN)
        block += bytes(-len(block) % align)
        block += argument
    return bytes(block)


def check_cluster(size: int, arch: str) -> None:
    """Raises `DriverError` for a number of CTAs that no cluster of an architecture has."""
    most = PORTABLE_CLUSTER if int(arch[3:5]) >= 90 else 1
    if not 1 <= size <= most: raise DriverError(f"a cluster of {size} CTAs on {arch}", f"1 to {most}")


# **** handles ****

class Module(ABC):
    """Code on the device."""

    @abstractmethod
    def function(self, name: str) -> Function:
        """An entry function. Raises `DriverError` naming those there are."""

    @abstractmethod
    def unload(self) -> None: ...


class Stream:
    """A queue of work. Opaque to callers."""


class Event:
    """A point in a stream. Opaque to callers."""


@dataclass(frozen=True)
class Node:
    """A node of a graph, by its number in order of addition."""
    number: int


class Executable(ABC):
    """An instantiated graph."""

    @abstractmethod
    def update(self, node: Node, work: Work) -> None:
        """Changes what the node does from the next launch on: the same function with the same window, or a
        copy or a fill again."""

    @abstractmethod
    def launch(self, stream: Stream | None = None) -> None:
        """Puts one run of the graph into a stream; it comes after the runs that were launched before it."""


class Graph(ABC):
    """Work with the edges between its pieces."""

    @abstractmethod
    def add(self, work: Work, after: Sequence[Node] = ()) -> Node:
        """A node that runs when those in `after` have ended."""

    @abstractmethod
    def instantiate(self) -> Executable: ...


class Driver(ABC):
    """One device. `stream=None` is stream 0, once it waits for `beside`, an event of work that kernels of
    stream 0 may run beside: those are given the stream itself. Of one that is `emulated`, times are of the
    emulation."""
    properties: Properties
    emulated = False
    beside: Event | None = None

    # memory

    @abstractmethod
    def alloc(self, nbytes: int) -> int:
        """Address of new memory, 256-byte aligned, contents undefined. Raises MemoryError when it is full."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Gives back what `alloc` returned, once the work issued before this call is done."""

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Bytes free on the device now, `slack_bytes` ones included, the rest may be of other processes; and
        bytes it has."""

    def slack_bytes(self) -> int:
        """Bytes that were given back and that the driver keeps for the next `alloc`."""
        return 0

    def trim(self) -> int:
        """Gives what is kept back to the device, for other processes and for pieces of other sizes, when the
        work that uses it is done; returns the bytes."""
        return 0

    @abstractmethod
    def host(self, nbytes: int) -> HostMemory:
        """Page-locked memory, contents undefined. Raises MemoryError when there is none."""

    @abstractmethod
    def copy_in(self, address: int, source: memoryview, stream: Stream | None = None) -> None: ...

    @abstractmethod
    def copy_out(self, target: memoryview, address: int, stream: Stream | None = None) -> None:
        """Waits for the stream, then copies."""

    @abstractmethod
    def copy_peer(self, work: Copy, source: Driver, stream: Stream | None = None) -> None:
        """Copies from another device of the same kind, after all that stream 0 there holds, and before what
        comes to that later."""

    @abstractmethod
    def reach(self, other: Driver) -> bool:
        """Lets kernels here address memory of another device; False where the hardware cannot."""

    def share(self, nbytes: int) -> tuple[int, bytes]:
        """Memory that other processes may use, too: its address, and what they open it by. Raises
        `DriverError` where there is no such thing."""
        raise DriverError(f"memory of the {self.properties.name} device for other processes", "a GPU's")

    def open_shared(self, handle: bytes) -> int:
        """The address here of memory that another process shares, while that has it. Raises `DriverError`
        where this device cannot address it."""
        raise DriverError(f"memory of other processes on the {self.properties.name} device", "a GPU's")

    def close_shared(self, address: int) -> None:
        """Gives back what `share` or `open_shared` returned, once the work issued before is done."""
        raise DriverError(f"address {address:#x} is closed", "what was shared or opened")

    @abstractmethod
    def set_persisting_l2(self, nbytes: int) -> None:
        """Sets so much of L2 aside for `Window`s, at most `properties.persisting_l2_limit`; 0 gives all back
        and forgets what is kept there."""

    @property
    @abstractmethod
    def stream_0(self) -> Stream:
        """Itself, not waiting for `beside`."""

    def wait_beside(self) -> None:
        """Makes stream 0 wait for `beside`."""
        if self.beside is not None:
            event, self.beside = self.beside, None
            self.wait(event, self.stream_0)

    # code

    @abstractmethod
    def most_clusters(self, size: int) -> int:
        """How many clusters of `size` (1 to 8) CTAs run at once, one CTA an SM: of 4, fewer than a quarter of
        the SMs where these come in groups that 4 does not divide. Raises `DriverError` for a size that the
        device has no clusters of."""

    @property
    def clusters(self) -> Clusters:
        """Clusters of every size that kernels have; none below sm_90."""
        if int(self.properties.arch[3:5]) < 90: return ()
        return tuple((size, self.most_clusters(size)) for size in SIZES)

    @abstractmethod
    def load(self, image: bytes) -> Module:
        """A module from PTX text or a cubin."""

    @abstractmethod
    def submit(self, work: Work, stream: Stream | None = None) -> None:
        """Puts work into a stream; into its graph while the stream is captured."""

    @abstractmethod
    def inside(self) -> AbstractContextManager[object]:
        """Makes this device the current one of the thread: for calls of other libraries."""

    # order

    @abstractmethod
    def stream(self) -> Stream: ...

    @abstractmethod
    def event(self) -> Event: ...

    @abstractmethod
    def record(self, event: Event, stream: Stream | None = None) -> None:
        """The event stands for all that the stream holds now."""

    @abstractmethod
    def wait(self, event: Event, stream: Stream | None = None) -> None:
        """Lets what is issued to the stream from now on run after the event. One never recorded is an error
        here, though CUDA takes it for done: it is always a mistake."""

    @abstractmethod
    def wait_for(self, event: Event) -> None:
        """Returns when the event has come to pass."""

    @abstractmethod
    def has_passed(self, event: Event) -> bool:
        """Whether the event has come to pass."""

    @abstractmethod
    def ms_between(self, start: Event, end: Event) -> float:
        """Milliseconds from one event to another; both have come to pass."""

    @abstractmethod
    def synchronize(self, stream: Stream | None = None) -> None:
        """Returns when the stream, or with None the device, has nothing left to do."""

    # graphs

    @abstractmethod
    def graph(self) -> Graph:
        """A graph without nodes."""

    @abstractmethod
    def begin_capture(self, stream: Stream) -> None: ...

    @abstractmethod
    def end_capture(self, stream: Stream) -> Graph: ...

    # tensor maps

    @abstractmethod
    def tensor_map(self, spec: TensorMapSpec) -> bytes:
        """The 128 bytes of a tensor map, for an argument of a launch. What cuTensorMapEncodeTiled refuses is
        an `NVError` that names the limit."""
