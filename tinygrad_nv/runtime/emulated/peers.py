"""Emulated devices whose kernels address each other's memory.

Protocol: work of a device is steps, a generator that yields what `Peers` runs (ptx/emulator/peers.py). A
device without peers does them at once. Those of peers are kept, in order of their calls, until the host
waits for one of the devices (`flush`): then the work of all runs beside one another, as on GPUs, and one
device's kernels may wait for what the host has submitted to another. Calls of libraries, which may be part
of a group that the host makes, are done as they are submitted. Streams of one device do not overlap here
either (order.py finds what nothing orders).
"""
from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

from tinygrad_nv.ptx.emulator import Emulator, Peers
from tinygrad_nv.ptx.emulator.peers import Asked, alone
from tinygrad_nv.ptx.emulator.report import Report

Steps = Generator[Asked, Report | None, None]


class PeerDevice(Protocol):
    """An `EmulatedDriver`."""
    emulator: Emulator
    peers: Any


class PeerDevices:
    """Devices that see each other's memory: at first one alone."""

    def __init__(self, device: PeerDevice) -> None:
        self.devices: list[PeerDevice] = [device]
        self.kept: dict[PeerDevice, list[Steps]] = {}
        self.flushes = 0

    def disjoint(self, other: PeerDevices) -> bool:
        """Whether no two devices of both have one ordinal."""
        mine = {each.emulator.ordinal for each in self.devices}
        return not any(each.emulator.ordinal in mine for each in other.devices)

    def join(self, other: PeerDevices) -> None:
        """From now on all of both are peers."""
        if other is self: return
        self.flush()
        other.flush()
        self.devices = sorted((*self.devices, *other.devices), key=lambda each: each.emulator.ordinal)
        for each in self.devices: each.peers = self

    def do(self, device: PeerDevice, steps: Steps, at_once: bool = False) -> None:
        """Work of a device; `at_once`: behind all that was kept, before this returns."""
        if len(self.devices) == 1:
            alone(steps)
            return
        if at_once: self.flush()
        self.kept.setdefault(device, []).append(steps)
        if at_once: self.flush()

    def flush(self) -> None:
        """Runs what was kept, each time by another seed."""
        if not self.kept: return
        kept, self.kept = self.kept, {}
        self.flushes += 1
        seed = self.devices[0].emulator.seed
        number = 1 if isinstance(seed, str) else seed
        Peers([each.emulator for each in self.devices], number + self.flushes).run(
            [_in_order(kept.get(each, [])) for each in self.devices])


def _in_order(kept: list[Steps]) -> Steps:
    for steps in kept: yield from steps
