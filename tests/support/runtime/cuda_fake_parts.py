"""What the fake driver's handles stand for: devices, streams, modules, functions, graphs."""
from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import cuda.bindings.driver as cu

from tests.support.runtime.cuda_structs import LaunchAttribute, parameters
from tinygrad_nv.runtime.driver import HostMemory, Launch, Node, Window, Work
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver

IDS = cu.CUlaunchAttributeID
CLUSTER, PDL, WINDOW = (int(each) for each in (
    IDS.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, IDS.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
    IDS.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW))


class Device:
    """A GPU: an emulated driver, its memory, and its primary context."""

    def __init__(self, ordinal: int, arch: str, check: bool) -> None:
        self.ordinal, self.emu = ordinal, EmulatedDriver(arch, check)
        self.context, self.references, self.lost = 0xc0000 + 0x100 * ordinal, 0, False
        self.capability = int(arch[3]), int(arch[4])
        self.memory: dict[int, int] = {}
        self.pools: dict[int, Pool] = {}
        self.pending: dict[int, FakeStream] = {}     # allocated in a stream not waited for yet
        self.pinned: dict[int, tuple[HostMemory, Any, int]] = {}
        self.reached: list[Device] = []
        self.streams: list[FakeStream] = []
        self.persisting, self.resets = 0, 0
        self._default: FakeStream | None = None

    def default(self) -> FakeStream:
        """CUDA's default stream."""
        if self._default is None: self._default = FakeStream(self)
        return self._default

    def alloc(self, nbytes: int, queue: FakeStream) -> int:
        address = self.emu.alloc(nbytes)
        self.memory[address], self.pending[address] = nbytes, queue
        return address

    def free(self, address: int, queue: FakeStream) -> None:
        assert address in self.memory, f"{address:#x} is freed and was not allocated"
        for each in self.streams:
            known = max(queue.seen.get(each, 0), each.done, each.issued if each is queue else 0)
            assert each.issued <= known, "memory is freed before work that was issued earlier is done"
        del self.memory[address]
        self.pools.pop(address).held -= 1
        self.emu.free(address)

    def host(self, nbytes: int) -> int:
        memory = self.emu.host(nbytes)
        raw = (ctypes.c_char * nbytes).from_buffer(memory.view)
        self.pinned[address := ctypes.addressof(raw)] = memory, raw, nbytes
        return address

    def at(self, address: int, nbytes: int) -> tuple[HostMemory, int]:
        """Page-locked memory, and where in it."""
        for first, (memory, _, size) in self.pinned.items():
            if first <= address and address + nbytes <= first + size: return memory, address - first
        raise AssertionError(f"{address:#x} is not page-locked")

    def finish(self) -> None:
        self.emu.synchronize()
        for each in self.streams: each.done = each.issued
        self.pending.clear()


class FakeStream:
    """A queue: how much was issued to it, how much is known to be done, what of others it waited for."""

    def __init__(self, device: Device) -> None:
        self.device, self.emu = device, device.emu.stream()
        self.issued = self.done = 0
        self.seen: dict[FakeStream, int] = {}
        device.streams.append(self)

    def submit(self, work: Work) -> None:
        assert not self.device.pending, "memory is used before its allocation was waited for"
        self.device.emu.submit(work, self.emu)
        self.issued += 1

    def clock(self) -> dict[FakeStream, int]: return {**self.seen, self: self.issued}

    def merge(self, clock: dict[FakeStream, int]) -> None:
        for each, count in clock.items(): self.seen[each] = max(self.seen.get(each, 0), count)

    def finish(self) -> None:
        """The host has waited."""
        self.device.emu.synchronize(self.emu)
        for each, count in self.clock().items(): each.done = max(each.done, count)
        self.device.pending = {a: q for a, q in self.device.pending.items() if q is not self}


@dataclass(eq=False)
class FakeEvent:
    """Where it was recorded, and what it stands for."""
    device: Device
    emu: Any
    timing: bool
    clock: dict[FakeStream, int] | None = None


@dataclass(eq=False)
class Pool:
    """A memory pool, how many pieces of it are held, and the bytes that it has of the device: the most that
    were held since it was trimmed."""
    device: Device
    attributes: dict[str, int] = field(default_factory=dict)
    shared: list[int] = field(default_factory=list)
    held: int = 0
    reserved: int = 0

    @property
    def used(self) -> int: return sum(self.device.memory.values())


class Module:
    """A loaded module."""

    def __init__(self, device: Device, image: bytes) -> None:
        self.device, self.emu = device, device.emu.load(image)
        self.names = list(self.emu.module.functions)  # type: ignore[attr-defined]
        self.functions: dict[str, Function] = {}

    def function(self, name: str) -> Function | None:
        if name not in self.names: return None
        if name not in self.functions: self.functions[name] = Function(self, name)
        return self.functions[name]


class Function:
    """A kernel: its parameters, and what cuFuncSetAttribute was told."""

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.emu, self.handle = module, module.emu.function(name), None
        self.parameters = list(module.emu.module.functions[name].parameters.values())  # type: ignore[attr-defined]
        self.set: dict[str, int] = {}

    def launch(self, given: Any, params: int, attributes: int, count: int) -> tuple[str, Launch | None]:
        """A launch as the C structs say it, or the status that refuses it."""
        args = parameters(params, [(p.nbytes, p.align) for p in self.parameters])
        grid, block = ((getattr(given, f"{what}DimX"), getattr(given, f"{what}DimY"),
                        getattr(given, f"{what}DimZ")) for what in ("grid", "block"))
        cluster, pdl, window = self.said(attributes, count)
        if min(*grid, *block) < 1 or block[0] * block[1] * block[2] > self.emu.attributes.max_threads:
            return "CUDA_ERROR_INVALID_VALUE", None
        if given.sharedMemBytes > self.set.get("MAX_DYNAMIC_SHARED_SIZE_BYTES", 49152):
            return "CUDA_ERROR_INVALID_VALUE", None
        if cluster[0] * cluster[1] * cluster[2] > 8 and not self.set.get("NON_PORTABLE_CLUSTER_SIZE_ALLOWED"):
            return "CUDA_ERROR_INVALID_CLUSTER_SIZE", None
        return "", Launch(self.emu, grid, block, args, given.sharedMemBytes, cluster, pdl, window)

    @staticmethod
    def said(attributes: int, count: int) -> tuple[tuple[int, int, int], bool, Window | None]:
        """Cluster, overlap and window of an array of CUlaunchAttributes."""
        cluster, pdl, window = (1, 1, 1), False, None
        for one in (LaunchAttribute * count).from_address(attributes) if count else ():
            if one.id == CLUSTER: cluster = tuple(one.value.cluster)
            elif one.id == PDL: pdl = one.value.number == 1
            elif one.id == WINDOW: window = window_of(one.value.window)
            else: raise AssertionError(f"launch attribute {one.id}")
        return cluster, pdl, window


def window_of(given: Any) -> Window:
    assert (given.hitProp, given.missProp) == (2, 1), "hits persist, misses stream"
    return Window(given.base_ptr, given.num_bytes, given.hitRatio)


@dataclass(eq=False)
class FakeNode:
    """A node: its work, and the nodes it follows with the edge's (from_port, type)."""
    graph: FakeGraph
    work: Work
    before: dict[FakeNode, tuple[int, int]] = field(default_factory=dict)


@dataclass(eq=False)
class FakeGraph:
    device: Device
    nodes: list[FakeNode] = field(default_factory=list)


class FakeExec:
    """An instantiated graph: the emulator's, with an overlap where an edge is programmatic."""

    def __init__(self, graph: FakeGraph) -> None:
        self.device, self.numbers = graph.device, {}
        made = graph.device.emu.graph()
        for node in graph.nodes:
            before = [self.numbers[each] for each in node.before]
            self.numbers[node] = made.add(overlapping(node, node.work), before)
        self.emu = made.instantiate()
        self.updates: Counter[Node] = Counter()

    def update(self, node: FakeNode, work: Work) -> None:
        self.emu.update(self.numbers[node], overlapping(node, work))
        self.updates[self.numbers[node]] += 1


def overlapping(node: FakeNode, work: Work) -> Work:
    """A node's work; `pdl` where one of its edges is programmatic."""
    kinds = set(node.before.values())
    assert kinds <= {(0, 0), (1, 1)}, f"edges of (port, type) {kinds}"
    if (1, 1) not in kinds: return work
    assert isinstance(work, Launch)
    assert all(isinstance(each.work, Launch) for each in node.before), "a programmatic edge from no kernel"
    assert len(kinds) == 1
    return Launch(work.function, work.grid, work.block, work.args, work.dynamic_smem, work.cluster, True,
                  work.window)
