"""The memory of GPUs that all-reduce with each other (tile/all_reduce), and the arguments of their kernels.

Protocol: `AllReduceGroup(drivers)` gives each device of this process a workspace
(tile/all_reduce/workspace.py), whose flags are zero, and a table of all workspaces' addresses.
`arguments(rank, outs, inputs)` are those of a kernel: its own pointers, the table, its rank. All ranks
launch the same kernels in one order; a launch may be a node of a graph, and is never waited for before the
other ranks' are submitted. `close` comes after all that uses the group.

A group of processes, of one device each, has the same table in each of them. What they exchange once, over
whatever connects them: a handle of each workspace (cuIpcGetMemHandle of memory from cuMemAlloc, which the
others open with cuIpcOpenMemHandle; or a file descriptor of cuMemExportToShareableHandle), in order of
ranks. A workspace's address differs between processes, and each has its own table. Flags are zeroed before
the exchange: a peer that has the handle may write them.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime.driver import Driver, Fill, integer, pointer
from tinygrad_nv.tile.all_reduce.workspace import Workspace


class AllReduceGroup:
    """Devices by rank. Raises `DriverError` where one cannot address another's memory."""

    def __init__(self, drivers: Sequence[Driver], workspace: Workspace | None = None) -> None:
        self.drivers, self.workspace = list(drivers), workspace or Workspace()
        for number, one in enumerate(self.drivers):
            for other, each in enumerate(self.drivers):
                if number != other and not one.reach(each):
                    raise DriverError(
                        f"device {number} of {len(self.drivers)} cannot address device {other}'s memory",
                        "GPUs with peer access, such as those of one NVSwitch", "use NCCL between them")
        self.workspaces = [each.alloc(self.workspace.nbytes) for each in self.drivers]
        self.tables = [each.alloc(8 * len(self.drivers)) for each in self.drivers]
        table = b"".join(map(pointer, self.workspaces))
        for driver, address, place in zip(self.drivers, self.workspaces, self.tables, strict=True):
            driver.submit(Fill(address, 0, self.workspace.data))
            driver.copy_in(place, memoryview(table))
        for driver in self.drivers: driver.synchronize()

    def arguments(self, rank: int, outs: Sequence[int], inputs: Sequence[int],
                  multicast: int = 0) -> tuple[bytes, ...]:
        """Of a kernel on the device of a rank: out, or out and residual_out; x, or x, residual and weight.
        `multicast` is for multimem: the address of an object over `workspaces`, which the caller has made."""
        addresses = (*outs, *inputs, self.tables[rank], *([multicast] if multicast else []))
        return *map(pointer, addresses), integer(rank)

    def close(self) -> None:
        """Gives the memory back."""
        for driver, *addresses in zip(self.drivers, self.workspaces, self.tables, strict=True):
            for address in addresses: driver.free(address)
