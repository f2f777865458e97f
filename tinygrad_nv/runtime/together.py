"""Kernels that several devices run together, each waiting for what the others write.

Protocol: `Peers` is what a kernel's `LaunchConfig.peers` says: groups of devices of this process, by rank.
`arguments` are what the kernel gets behind its pointers: the table of its group's workspaces, which is made
with the first kernel (runtime/all_reduce.py) and lives as long as the first device, and the rank of the
device.

tinygrad runs a kernel over several devices device by device. `launch` keeps the launches until that of the
last device comes, and then submits all of them. Nothing that waits for a device may come between them: the
kernel there would wait for one that is not submitted yet. So no code is loaded then, nothing is timed but the
last device, and no garbage is collected, whose finalizers may wait.
"""
from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinygrad import Device

from tinygrad_nv import collection
from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime.all_reduce import AllReduceGroup
from tinygrad_nv.runtime.driven import DrivenDevice
from tinygrad_nv.runtime.driver import Stream, Work, integer, pointer
from tinygrad_nv.runtime.memory_pool import label_allocations
from tinygrad_nv.tile.all_reduce.workspace import Workspace

LABEL = "all-reduce"


@dataclass(frozen=True)
class Peers:
    """Devices that run a kernel together, in groups that have nothing to do with each other."""
    groups: tuple[tuple[str, ...], ...]
    workspace: Workspace = field(default_factory=Workspace)

    def __str__(self) -> str: return "|".join(",".join(each) for each in self.groups)

    def arguments(self, device: str) -> tuple[bytes, ...]:
        """Returns the arguments of the kernel on a device."""
        names = next((each for each in self.groups if device in each), ())
        if not names: raise DriverError(f"a kernel that {self} run together, on {device}", "one of them")
        rank = names.index(device)
        return pointer(group(names, self.workspace).tables[rank]), integer(rank)

    def give(self, device: str) -> None:
        """Does nothing: no other process has to be waited for."""

    def agree(self, device: str) -> None:
        """One program makes the launches of all."""

    def launch(self, device: DrivenDevice, works: Sequence[Work], stream: Stream | None,
                 wait: bool) -> float | None:
        """Takes the launch of a device, and submits all with the last."""
        if getattr(_own, "peers", None) != self or any(each is device for each, _, _ in _own.kept):
            _own.peers, _own.kept = self, []    # without what a call has left that failed between devices
        kept: list[tuple[DrivenDevice, Sequence[Work], Stream | None]] = _own.kept
        kept.append((device, works, stream))
        if len(kept) < sum(map(len, self.groups)): return None
        every, _own.kept = kept, []

        def submit() -> None:
            for each, given, into in every:
                for work in given: each.driver.submit(work, into)
        with _turn, collection.pause(): return device.submit_timed(submit, wait)


_own = threading.local()
_turn = threading.Lock()    # kernels of two threads come to all devices in one order


def group(names: tuple[str, ...], workspace: Workspace) -> AllReduceGroup:
    """The workspaces of some devices, by rank. Raises `DriverError`."""
    opened = [Device[name] for name in names]
    devices = [each for each in opened if isinstance(each, DrivenDevice)]
    if len(devices) < len(opened):
        raise DriverError(f"{', '.join(names)} all-reduce over peer memory", "devices of tinygrad_nv")
    drivers = [each.driver for each in devices]
    known = devices[0].together
    if (found := known.get((names, workspace))) is not None and found.drivers == drivers: return found
    with label_allocations(LABEL): made = AllReduceGroup(drivers, workspace, [each.pool for each in devices])
    known[names, workspace] = made
    return made
