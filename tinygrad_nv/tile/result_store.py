"""From sums in registers to the result in memory.

Protocol: a warp holds cells, each 16 rows by 8 columns of every part's sums, in the fragment that mma.m16n8
and wgmma share: of a cell, registers 2h and 2h + 1 are row g + 8h, columns 2q and 2q + 1, g = lane / 4,
q = lane % 4. A wgmma of m64nN gives N / 8 cells to each warp: cell j has registers 4j … 4j + 3, and warp p of
the warpgroup begins 16 p rows further down.

    plan = store_plan(stored, tile)                             # a `StoreTarget`: GemmSpec.store_target
    staging = k.shared("staging", plan.smem_bytes, align=1024) if plan.smem_bytes else None
    out_map = k.tensor_map("out_map") if plan.map else None     # with plan.map among the kernel's maps
    store = Store(k, stored, plan, out, extras, rows, staging, out_map)
    ...                                                         # once, or for every tile of a persistent CTA:
    cells = [Cell(16 * i, 8 * j, [sums[i][j]]) for i in … for j in …]
    store.tile(first_m, first_n, batch, cells)                  # the warp's first row and column, u32
    ...
    store.finish()                                              # before the kernel ends

`out` and `extras` are the kernel's pointers, without offsets; `rows` is how many rows there are (u32);
`batch` the indices of the matrix (u32). What lies outside the result is computed, never stored.

The plan chooses one of three ways: a tensor map (warpgroups, rows aligned to 16 bytes), 16 bytes a thread
from staged lines (warps, the same), or each pair of elements by itself. `staging` is the
shared memory of the first two, at a multiple of 1024; it may be an address (u32) in memory that all CTAs have
ceased to use. Without it, or without the map the plan asks for, elements are stored by themselves. In `tile`
all warps of a warpgroup take part together (wgmma), or each warp for itself (mma); staging by warpgroups uses
the named barriers from `barrier` on, one for each.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.ptx.builder import Value
from tinygrad_nv.tile.staging import Staged
from tinygrad_nv.tile.store_plan import Cell, Destination, Share


class Store(Destination):
    """Finishes sums and stores them; see the module."""

    def tile(self, first_m: Value, first_n: Value, batch: Sequence[Value], cells: Sequence[Cell]) -> None:
        """Stores what a warp holds, whose first element is at (`first_m`, `first_n`) of the matrix."""
        share = Share(self, first_m, first_n, batch, cells)
        if self.is_staged: return Staged(share).run()
        # columns outside: what belongs to a row is needed throughout, and there are fewer rows
        for row, column in sorted(share.halves, key=lambda at: (at[1], at[0])):
            share.put(row, column, share.finish.at(row, column))
        return None

    @property
    def is_staged(self) -> bool:
        """Whether the result goes by way of shared memory."""
        mapped = (self.plan.map is None) == (self.out_map is None)
        return self.plan.panel is not None and self.staging is not None and mapped

    def finish(self) -> None:
        """Waits until shared memory may go."""
        if self.is_staged and self.out_map is not None: self.kb.tma_wait(0, read=True)
