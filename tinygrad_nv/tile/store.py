"""From sums in registers to the result in memory.

Protocol: a warp holds cells, each 16 rows by 8 columns of every part's sums, in the fragment that mma.m16n8
and wgmma share: of a cell, registers 2h and 2h + 1 are row g + 8h, columns 2q and 2q + 1, g = lane / 4,
q = lane % 4. A wgmma of m64nN gives N / 8 cells to each warp: cell j has registers 4j … 4j + 3, and warp p of
the warpgroup begins 16 p rows further down.

    plan = store_plan(spec, schedule, arch)
    staging = k.shared("staging", plan.smem_bytes, align=1024) if plan.smem_bytes else None
    out_map = k.tensor_map("out_map") if plan.map else None     # with plan.map among the kernel's maps
    store = Store(k, spec, plan, out, extras, rows, staging, out_map)
    ...                                                         # once, or for every tile of a persistent CTA:
    cells = [Cell(16 * i, 8 * j, [sums[i][j]]) for i in … for j in …]
    store.tile(first_m, first_n, batch, cells)                  # the warp's first row and column, u32
    ...
    store.finish()                                              # before the kernel ends

`out` and `extras` are the kernel's pointers, without offsets; `rows` is how many rows there are (u32);
`batch` the indices of the matrix (u32). All threads of the warp take part in `tile`. What lies outside the
result is computed, never stored.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.tile.access import advanced, read, write
from tinygrad_nv.tile.epilogue import Finish
from tinygrad_nv.tile.expression import Load
from tinygrad_nv.tile.kernel import MapArgument
from tinygrad_nv.tile.lanes import Lanes
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.spec import GemmSpec


@dataclass(frozen=True)
class StorePlan:
    """How the result is stored. `edges_m`, `edges_n`: whether tiles reach beyond it."""
    edges_m: bool
    edges_n: bool
    smem_bytes: int = 0
    map: MapArgument | None = None


def store_plan(spec: GemmSpec, schedule: Schedule, arch: str) -> StorePlan:
    """The plan for a product, a schedule's tile and an architecture."""
    return StorePlan(spec.symbolic or spec.m % schedule.block_m != 0, spec.n % schedule.block_n != 0)


@dataclass(frozen=True)
class Cell:
    """16 rows from `row`, 8 columns from `column` of what the warp holds: of each part, four registers."""
    row: int
    column: int
    sums: Sequence[Sequence[Value]]


@dataclass
class Store:
    """Finishes sums and stores them; see the module."""
    k: Kernel
    spec: GemmSpec
    plan: StorePlan
    out: Value
    extras: Sequence[Value]
    rows: Value
    staging: Shared | None = None
    out_map: Value | None = None

    def tile(self, first_m: Value, first_n: Value, batch: Sequence[Value], cells: Sequence[Cell]) -> None:
        """Stores what a warp holds, whose first element is at (`first_m`, `first_n`) of the matrix."""
        place = Place(self, first_m, first_n, batch, cells)
        finish = Finish(self.k, self.spec.epilogue, place)
        # columns outside: what belongs to a row is needed throughout, and there are fewer rows
        for row, column in sorted(place.halves, key=lambda at: (at[1], at[0])):
            place.put(row, column, finish.at(row, column))

    def finish(self) -> None:
        """Waits for what is still on its way."""


class Place:
    """A warp's share of the result: what lies where, and what of it is inside. Rows and columns are counted
    from the lane's first pair."""

    def __init__(self, store: Store, first_m: Value, first_n: Value, batch: Sequence[Value],
                 cells: Sequence[Cell]) -> None:
        self.store, self.k, self.spec, self.batch = store, store.k, store.spec, batch
        lane = self.k.special("laneid")
        self.m, self.n = first_m + (lane >> 2), first_n + ((lane & 3) << 1)
        self.halves = {(cell.row + 8 * h, cell.column): [part[2 * h:2 * h + 2] for part in cell.sums]
                       for cell in cells for h in range(2)}
        self.bases: dict[Load | None, Value] = {}
        self.inside: dict[tuple[str, int], Value] = {}
        self.both: dict[tuple[int, int, int], Value | None] = {}

    # **** what is inside ****

    def bounded(self, axis: str, offset: int) -> Value:
        """Whether row (or column) `offset` is one of the result's."""
        if (axis, offset) not in self.inside:
            first, bound = (self.m, self.store.rows) if axis == "m" else (self.n, self.spec.n)
            self.inside[axis, offset] = (first + offset if offset else first) < bound
        return self.inside[axis, offset]

    def guard(self, row: int | None, column: int | None) -> Value | None:
        """A predicate that holds inside; None where all is. A row or column left out is not asked for."""
        row = row if self.store.plan.edges_m else None
        column = column if self.store.plan.edges_n else None
        if row is None: return None if column is None else self.bounded("n", column)
        if column is None: return self.bounded("m", row)
        key = (row, column, 0)
        if key not in self.both: self.both[key] = self.bounded("m", row) & self.bounded("n", column)
        return self.both[key]

    def whole_pairs(self) -> bool:
        """Whether both elements of a pair are inside, or none."""
        return not self.store.plan.edges_n or self.spec.n % 2 == 0

    # **** what an epilogue reads ****

    def sums(self, part: int, row: int, pair: int) -> Sequence[Value]:
        return self.halves[row, pair][part]

    def position(self, axis: str | int, row: int, pair: int) -> Sequence[Value]:
        if axis == "m": return [(self.m + row).to("s32")]
        if axis == "n": return [(self.n + (pair + i)).to("s32") for i in range(2)]
        return [self.batch[int(axis)].to("s32")]

    def load(self, load: Load, row: int, pair: int) -> Lanes:
        size, k = load.dtype.itemsize, self.k
        if load not in self.bases:
            pointer = self.store.extras[load.parameter]
            self.bases[load] = self.base(pointer, load.m, load.n, load.batch, load.offset, size)
        base, at = self.bases[load], (row * load.m + pair * load.n) * size
        on_row = row if load.m else None
        if not load.n: return read(k, base, at, load.dtype, 1, self.guard(on_row, None))
        strides = (load.m, load.offset, *load.batch)
        if load.n == 1 and self.whole_pairs() and not any(stride % 2 for stride in strides):
            return read(k, base, at, load.dtype, 2, self.guard(on_row, pair))
        return Lanes(k, load.dtype, [read(k, base, at + i * load.n * size, load.dtype, 1,
                                          self.guard(on_row, pair + i)).at(0) for i in range(2)])

    def base(self, pointer: Value, m: int, n: int, batch: Sequence[int], offset: int, size: int) -> Value:
        """The address of the lane's first element of a tensor with these strides."""
        base = pointer + offset * size if offset else pointer
        for index, stride in zip(self.batch, batch or [0] * len(self.batch), strict=True):
            base = advanced(self.k, base, index, stride * size)
        return advanced(self.k, advanced(self.k, base, self.m, m * size), self.n, n * size)

    # **** the result ****

    def put(self, row: int, pair: int, value: Lanes) -> None:
        """Stores a pair."""
        out, k, size = self.spec.out, self.k, self.spec.out.dtype.itemsize
        if None not in self.bases:
            self.bases[None] = self.base(self.store.out, out.m, out.n, out.batch, out.offset, size)
        base, at = self.bases[None], (row * out.m + pair * out.n) * size
        aligned = out.n == 1 and not any(stride % 2 for stride in (out.m, out.offset, *out.batch))
        if aligned and self.whole_pairs(): return write(k, base, at, value, 2, self.guard(row, pair))
        for i in range(2):
            write(k, base, at + i * out.n * size, value, 1, self.guard(row, pair + i), first=i)
        return None
