"""State on the host, moved to the device for the update of its parameter and back.

Protocol. `PagedSlot(inner, device)` keeps another slot in memory of the CPU: `read` copies its numbers to the
device, `write` copies the new ones back. Copies of a parameter depend on nothing of another parameter, so a
device with a copy queue moves the next one's state while one is updated; the device has the state of those
under way alone. On a CPU nothing moves: the slot itself is used.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor

from tinygrad_nv.train.optimizers.state import FloatSlot, keep

HOST = "CPU"


@dataclass
class PagedSlot:
    """Float32 numbers in the host's memory."""
    inner: FloatSlot
    device: str

    def read(self) -> Tensor: return self.inner.read().to(self.device)

    def write(self, value: Tensor, go: Tensor | None) -> Tensor:
        value = keep(go, value, self.read()).contiguous()
        self.inner.tensor.assign(value.to(HOST))
        return value

    def tensors(self) -> dict[str, Tensor]: return self.inner.tensors()


def pages(device: str | tuple[str, ...] | None) -> bool:
    """Whether state of a device's parameters has a host to go to."""
    return isinstance(device, str) and device.split(":")[0] != HOST
