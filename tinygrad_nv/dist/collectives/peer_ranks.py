"""All-reduce of small messages between ranks that are processes, by kernels over the memory of peers.

Protocol: `open_workspaces(group, device)` gives a group, once for a device of each rank, workspaces that all
of them address (tile/all_reduce/workspace.py), or says why there are none. All ranks call it, before they
load a step with such a kernel. Each says by the group's transport which host it is on, NV_ALL_REDUCE, its
GPU's architecture, and what its memory (with flags that are zero before) is opened by, on GPUs a
handle of cuIpcGetMemHandle; then whether it could open all others'. Where one could
not, none has any. `lower` puts a kernel into the graph in the place of a call of NCCL, where one is to do
it.

At the end (`World.leave_peers`) each rank waits for its kernels, closes the others' memory, and says so. It
frees its own when all others have closed it: CUDA does not define what happens to an open handle of freed
memory.

A kernel is a launch like any other, in streams and graphs, that is a collective for the watchdog, and behind
other collectives of its rank. It cannot be ended from outside on a GPU, where a process that ends ends it;
on an emulated one it looks at the group whenever it waits.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from platform import node
from typing import Any, cast

import numpy as np
from tinygrad import Device, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from tinygrad_nv import config
from tinygrad_nv.dist.collectives import peer_memory
from tinygrad_nv.dist.group import Group, world
from tinygrad_nv.dist.transports.nccl import CollectiveCall, Communicator
from tinygrad_nv.errors import DistError, DriverError
from tinygrad_nv.patterns.program import Output, program
from tinygrad_nv.patterns.target import target_of
from tinygrad_nv.runtime.driven import DrivenDevice
from tinygrad_nv.runtime.driver import Driver, Fill, Stream, Work, integer, pointer
from tinygrad_nv.tile.all_reduce.spec import MOST_WORLD
from tinygrad_nv.tile.all_reduce.workspace import Workspace
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

SAID_BYTES = 512    # of what a rank says
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Workspaces:
    """Workspaces of a group's ranks as this rank's device addresses them, `own` among them, and the table of
    their addresses."""

    def __init__(self, driver: Driver, own: int, addresses: Sequence[int]) -> None:
        self.driver, self.own, self.addresses = driver, own, tuple(addresses)
        self.table = driver.alloc(8 * len(self.addresses))
        driver.copy_in(self.table, memoryview(b"".join(map(pointer, self.addresses))))
        driver.synchronize()
        if driver.emulated: _emulator(driver).waited = world().check

    def leave(self) -> None:
        """Waits for this rank's kernels, and closes the other ranks' memory."""
        self.driver.synchronize()
        for address in self.addresses:
            if address != self.own: self.driver.close_shared(address)
        self.driver.free(self.table)
        self.forget()

    def free(self) -> None:
        """Frees this rank's own memory, which all others have closed."""
        self.driver.close_shared(self.own)

    def forget(self) -> None:
        """Launches no longer depend on the group."""
        if self.driver.emulated: _emulator(self.driver).waited = lambda: None


def _emulator(driver: Driver) -> Any: return cast(Any, driver).emulator


def open_workspaces(group: Group, device: DrivenDevice) -> None:
    """Opens what kernels of the group on this rank's device need, or notes why there are none: in
    `group.peers`."""
    if device.device in group.peers: return
    setting = str(config.get("NV_ALL_REDUCE"))
    group.peers[device.device] = _exchange_handles(group, device.driver, setting) \
        if group.size <= MOST_WORLD else \
        f"{group.size} ranks, and the kernels of peer memory are for {MOST_WORLD}"


def _exchange_handles(group: Group, driver: Driver, setting: str) -> Workspaces | str:
    own, mine = _share_workspace(driver) if setting != "nccl" else (0, {})
    said = _exchange(group, {"host": _host(), "setting": setting, "arch": driver.properties.arch, **mine})
    if why := _unlike(group, said):
        # all ranks find this: none has opened another's memory
        if own: driver.close_shared(own)
        if isinstance(why, DistError): raise why
        return why
    opened, problem = dict[int, int](), ""
    try:
        for rank, each in enumerate(said):
            if "why" in each: raise DriverError(each["why"])
            if rank != group.rank: opened[rank] = driver.open_shared(bytes.fromhex(each["handle"]))
    except DriverError as no: problem = no.found
    others = [(rank, each["why"]) for rank, each in
              zip(group.members, _exchange(group, {"why": problem}), strict=True) if each["why"]]
    if not others: return Workspaces(driver, own, [opened.get(rank, own) for rank in range(group.size)])
    for address in opened.values(): driver.close_shared(address)
    _exchange(group, {})       # memory is freed when no other rank has it open
    if own: driver.close_shared(own)
    return f"rank {others[0][0]}: {others[0][1]}"


def _unlike(group: Group, said: Sequence[dict[str, Any]]) -> DistError | str:
    """Why ranks that say this share no memory; "" where they do."""
    if len({each["setting"] for each in said}) > 1:
        words = ", ".join(f"{each['setting']} on rank {rank}"
                          for rank, each in zip(group.members, said, strict=True))
        return DistError(f"NV_ALL_REDUCE is {words}", "one value on all ranks", "export it to all of them")
    if said[0]["setting"] == "nccl": return "NV_ALL_REDUCE=nccl"
    if len({each["host"] for each in said}) > 1: return "ranks of several hosts"
    archs = sorted({each["arch"] for each in said})
    # each rank chooses the kernel by its own GPU, and all must choose the same
    return f"GPUs that are not alike: {', '.join(archs)}" if len(archs) > 1 else ""


def _share_workspace(driver: Driver) -> tuple[int, dict[str, str]]:
    """A workspace whose flags are zero: its address, and what others open it by."""
    layout = Workspace()
    try: address, handle = driver.share(layout.nbytes)
    except DriverError as no: return 0, {"why": no.found}
    try:
        driver.submit(Fill(address, 0, layout.data))
        driver.synchronize()
    except BaseException:
        driver.close_shared(address)
        raise
    return address, {"handle": handle.hex()}


def _host() -> str: return f"{node()} {BOOT.read_text().strip() if BOOT.exists() else ''}"


def _exchange(group: Group, own: dict[str, str]) -> list[dict[str, Any]]:
    """Returns what all ranks of a group say."""
    data = json.dumps({key: value[:SAID_BYTES // 2] for key, value in own.items()}).encode().ljust(SAID_BYTES)
    every = np.empty(SAID_BYTES * group.size, np.uint8)
    group.run("all_gather", every, np.frombuffer(data, np.uint8), SAID_BYTES, dtypes.uint8,
              name="workspaces of peers")
    return [json.loads(every[SAID_BYTES * r:SAID_BYTES * (r + 1)].tobytes()) for r in range(group.size)]


# **** in the graph ****

@dataclass(frozen=True)
class RankPeers:
    """The group, by its key, and the collective of a kernel's `LaunchConfig.peers`. Its methods are those of
    `runtime.together.Peers`."""
    group: str
    order: CollectiveCall

    def __str__(self) -> str: return f"ranks of {self.group}"

    def _communicator(self, device: str) -> Communicator:
        made = _group(self.group).communicators.get(device)
        if made is None: raise self._not_open(device)
        return made

    def _not_open(self, device: str) -> DistError:
        return DistError(f"an all_reduce over the memory of peers, which group {self.group} has not opened "
                         f"on {device}", "workspaces of all ranks before the step is loaded",
                         "call dist.collectives.device.prepare(group, device) on all ranks")

    def arguments(self, device: str) -> tuple[bytes, ...]:
        """The table of workspaces, and the rank."""
        group = _group(self.group)
        there = group.peers.get(device)
        if not isinstance(there, Workspaces): raise self._not_open(device)
        return pointer(there.table), integer(group.rank)

    def give(self, device: str) -> Callable[[Any, bool], None]:
        """Tells the watchdog of a launch in a graph."""
        comm = self._communicator(device)

        def tell(event: Any, new: bool) -> None:
            if new: comm.check()
            comm.note(self.order, event, new)
        return tell

    def agree(self, device: str) -> None:
        """A graph has the kernel: all ranks say what they call, each time."""
        self._communicator(device).agree_on(self.order)

    def launch(self, device: DrivenDevice, works: Sequence[Work], stream: Stream | None,
                 wait: bool) -> float | None:
        """Submits the launch, behind collectives of libraries that are beside stream 0."""
        comm, driver = self._communicator(device.device), device.driver
        comm.begin(self.order)

        def submit() -> None:
            for work in works: driver.submit(work)
        seconds = device.submit_timed(submit, wait)
        driver.record(done := driver.event())
        comm.note(self.order, done, False)
        return seconds


def _group(key: str) -> Group:
    found = next((group for group in world().groups if group.key == key), None)
    if found is None: raise DistError(f"an all_reduce of the group {key}", "a group of this process")
    return found


def choose_kernel(key: str, order: CollectiveCall, device: str, columns: int = 0,
           eps: float = 0.0) -> peer_memory.Chosen | str:
    """The kernel of a collective, with `columns` that of rows that are normalized; or why NCCL does it."""
    group, gpu = _group(key), target_of(device)
    there = group.peers.get(device, "no workspaces")
    if isinstance(there, str): return there
    assert isinstance(gpu, GPU)
    return peer_memory.choose_kernel(group.size, order.count, order.dtype, order.op, gpu, columns, eps)


def lower(key: str, order: CollectiveCall, shape: tuple[int, ...], dtype: DType, x: UOp, name: str,
            behind: tuple[UOp, ...] = (), eps: float = 0.0) -> tuple[UOp, ...] | str:
    """The results of the kernel of a collective in the graph, or why NCCL does it. With residual and weight
    `behind` it, rows are normalized, and the second result is the new residual."""
    device = Device.canonicalize(str(x.device))
    made, gpu = choose_kernel(key, order, device, shape[-1] if behind else 0, eps), target_of(device)
    if isinstance(made, str): return made
    assert isinstance(gpu, GPU)
    spec, schedule = made
    kernel, note = TABLE.build(spec, schedule, gpu), peer_memory.note(spec, schedule)
    return program(kernel.name, kernel.ptx, str(x.device), [Output(shape, dtype)] * (2 if behind else 1),
                   [x, *behind], grid=kernel.grid, block=kernel.block, flops=(spec.world - 1) * spec.count,
                   nbytes=spec.world * spec.nbytes, note=replace(note, reason=f"{name}: {note.reason}"),
                   launch=replace(kernel.launch, peers=RankPeers(key, order)))
