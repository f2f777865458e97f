"""The emulated GPU of one process of a program: what work runs on.

Protocol: `Device` has the memory, the emulator and what is known of launches; it knows no streams and no
handles.
"""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tinygrad_nv.host.errors import Status
from tinygrad_nv.host.gpus import HostGPU
from tinygrad_nv.host.launches import LaunchReport, Options
from tinygrad_nv.host.memory import Kind, Memory
from tinygrad_nv.host.wire import Wire
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.timing.model import Timing


@dataclass
class Results:
    """Results of a program. `refused`: calls and device code that are not emulated; `order`: work that
    nothing orders; `notes`: why calls returned errors."""
    launches: list[LaunchReport] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Device:
    """`sticky`: the error of a kernel that went wrong, which every later call returns. `timings`: predictions
    by launches."""
    wire: Wire
    gpu: HostGPU
    emulator: Emulator
    memory: Memory
    options: Options
    results: Results
    sticky: Status = Status.SUCCESS
    timings: dict[object, Timing] = field(default_factory=dict)

    def print(self, text: str) -> None:
        """Prints what kernels print by the program's own printf, in order with its own lines."""
        data = b"%s\0" + text.encode() + b"\0"
        place = self.memory.alloc(len(data), Kind.HOST)
        place.buffer.data[:] = np.frombuffer(data, np.uint8)
        self.wire.run(self.wire.printf, place.address, place.address + 3)
        self.memory.free(place.address, (Kind.HOST,))
