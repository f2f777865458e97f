"""Calls of libraries that put work of their own into a stream, as NCCL does.

Protocol: a `LibraryCall` is work of the driver interface (driver.py). `enqueue(handle)` calls the library for
the stream of that handle, in the device's context; the driver knows nothing more of it than which bytes it
reads and writes, each an address and a number. In a graph it is one node: the CUDA driver captures what the
library puts into a stream as a graph of its own, the emulated one runs it when the node's turn comes. Calls
of one graph follow one another in the order in which they were added, since two collectives of a device that
run at once may each wait for what another device runs second.

A kernel's `LaunchConfig.call` stands for a call in tinygrad's graph: `make_call` asks what is registered for
its type for the `LibraryCall` of some buffers. """
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Bytes = tuple[tuple[int, int], ...]  # addresses, each with a number of bytes


@dataclass(frozen=True)
class LibraryCall:
    """One call. `holds` gives what a graph that has it must keep. `given` is told an event after which the
    call is done, and whether a graph that has it was launched: else the call was put into a stream itself."""
    what: str
    reads: Bytes
    writes: Bytes
    enqueue: Callable[[int], None] = field(compare=False, repr=False)
    holds: Callable[[], object] = field(compare=False, repr=False, default=lambda: None)
    given: Callable[[Any, bool], None] = field(compare=False, repr=False, default=lambda event, replay: None)


Make = Callable[[Any, str, Sequence[int]], LibraryCall]  # (what is called, name of the device, buffers)
_makers: dict[type, Make] = {}


def register(kind: type, make: Make) -> None:
    """Makes calls of what is of this type."""
    _makers[kind] = make


def make_call(call: object, device: str, buffers: Sequence[int]) -> LibraryCall:
    """Returns the call on these buffers."""
    return _makers[type(call)](call, device, buffers)
