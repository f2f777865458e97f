"""The memory of GPUs that all-reduce with each other (tile/all_reduce), and the arguments of their kernels.

Protocol: `AllReduceGroup(drivers)` gives each device of this process a workspace
(tile/all_reduce/workspace.py), whose flags are zero, and a table of all workspaces' addresses.
`arguments(spec, schedule, rank, outs, inputs)` are those of a kernel: its own pointers, the table, its rank.
All ranks launch the same kernels in one order; a launch may be a node of a graph, and is never waited for
before the other ranks' are submitted. `close` comes after all that uses the group.

`together.py` has the groups of tensors over several devices; processes have theirs in
dist/collectives/peer_ranks.py.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime.driver import Driver, Fill, integer, pointer
from tinygrad_nv.tile.all_reduce.schedules import AllReduceSchedule, Multimem
from tinygrad_nv.tile.all_reduce.spec import AllReduceSpec
from tinygrad_nv.tile.all_reduce.workspace import Workspace


class Memory(Protocol):
    """Allocator of a device's memory: its driver, or a `MemoryPool` that accounts for it."""

    def alloc(self, nbytes: int) -> int: ...

    def free(self, address: int) -> None: ...


class AllReduceGroup:
    """Devices by rank; their memory is from `memories` if these are given. Raises `DriverError` where one
    cannot address another's memory."""

    def __init__(self, drivers: Sequence[Driver], workspace: Workspace | None = None,
                 memories: Sequence[Memory] = ()) -> None:
        self.drivers, self.workspace = list(drivers), workspace or Workspace()
        self.memories: list[Memory] = list(memories or drivers)
        if apart := find_unreachable(self.drivers):
            raise DriverError(
                f"device {apart[0]} of {len(self.drivers)} cannot address device {apart[1]}'s memory",
                "GPUs with peer access, such as those of one NVSwitch", "use NCCL between them")
        self.workspaces = [each.alloc(self.workspace.nbytes) for each in self.memories]
        self.tables = [each.alloc(8 * len(self.drivers)) for each in self.memories]
        table = b"".join(map(pointer, self.workspaces))
        for driver, address, place in zip(self.drivers, self.workspaces, self.tables, strict=True):
            driver.submit(Fill(address, 0, self.workspace.data))
            driver.copy_in(place, memoryview(table))
        for driver in self.drivers: driver.synchronize()

    def arguments(self, spec: AllReduceSpec, schedule: AllReduceSchedule, rank: int, outs: Sequence[int],
                  inputs: Sequence[int], multicast: int = 0) -> tuple[bytes, ...]:
        """Returns the arguments of the kernel of a spec and a schedule on the device of a rank: out, or out
        and residual_out; x, or x, residual and weight. `multicast` is for multimem: the address of an object
        over `workspaces`, which the caller has made. Raises `DriverError` for a kernel of another group."""
        self._check(spec, schedule, rank)
        wanted = (2, 3) if spec.columns else (1, 1)
        if (len(outs), len(inputs)) != wanted:
            raise DriverError(f"{len(outs)} results and {len(inputs)} inputs of {spec}",
                              f"{wanted[0]} and {wanted[1]}")
        if bool(multicast) != isinstance(schedule, Multimem):
            raise DriverError(f"{schedule.template} {'with' if multicast else 'without'} a multicast object",
                              "one for multimem, none for others")
        addresses = (*outs, *inputs, self.tables[rank], *([multicast] if multicast else []))
        return *map(pointer, addresses), integer(rank)

    def _check(self, spec: AllReduceSpec, schedule: AllReduceSchedule, rank: int) -> None:
        if spec.world != len(self.drivers):
            raise DriverError(f"a kernel for {spec.world} GPUs in a group of {len(self.drivers)}",
                              "as many as the group has")
        if schedule.workspace != self.workspace:
            raise DriverError(f"a kernel for {schedule.workspace} over {self.workspace}",
                              "the workspace of the group",
                              "make the schedule with its channels and half_bytes")
        if not 0 <= rank < spec.world: raise DriverError(f"rank {rank}", f"0 to {spec.world - 1}")

    def close(self) -> None:
        """Gives the memory back, once no device uses another's."""
        for driver in self.drivers: driver.synchronize()
        for memory, *addresses in zip(self.memories, self.workspaces, self.tables, strict=True):
            for address in addresses: memory.free(address)


def find_unreachable(drivers: Sequence[Driver]) -> tuple[int, int] | None:
    """A device that cannot address another's memory, and that one; None where all reach all."""
    for number, one in enumerate(drivers):
        for other, each in enumerate(drivers):
            if number != other and not one.reach(each): return number, other
    return None
