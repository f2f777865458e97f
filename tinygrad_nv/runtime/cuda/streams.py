"""Streams and events of the CUDA driver.

Protocol: a capture is ours (runtime/capture.py), not CUDA's: what is submitted to a captured stream becomes a
node of a graph, after the last nodes of its stream. CUDA's own capture would make the same nodes, but while
it lasts it forbids synchronising with anything of the context, and it gives a node no number to update it by.

A stream is `busy` once work was put into it that the stream of frees has not been made to wait for.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinygrad_nv.runtime import driver
from tinygrad_nv.runtime.capture import Capture
from tinygrad_nv.runtime.driver import Node


@dataclass(eq=False)
class CUDAStream(driver.Stream):
    """`number` counts the device's streams, `handle` is a CUstream, `mark` an event for joining it. A stream
    of other code (`external`) is not destroyed with the device."""
    owner: object
    number: int
    handle: Any
    mark: Any
    external: bool = False
    busy: bool = False
    capture: Capture[Any] | None = None


@dataclass(eq=False)
class CUDAEvent(driver.Event):
    """Event: where it was recorded last; in a capture, after which nodes."""
    handle: Any
    stream: CUDAStream | None = None
    capture: Capture[Any] | None = None
    nodes: tuple[Node, ...] = ()
