"""From sums in registers to the result in memory.

Protocol: a warp holds cells, each 16 rows by 8 columns of every part's sums, in the fragment that mma.m16n8
and wgmma share: of a cell, registers 2h and 2h + 1 are row g + 8h, columns 2q and 2q + 1, g = lane / 4,
q = lane % 4. A wgmma of m64nN gives N / 8 cells to each warp: cell j has registers 4j … 4j + 3, and warp p of
the warpgroup begins 16 p rows further down.

    plan = store_plan(spec, schedule)
    staging = k.shared("staging", plan.smem_bytes, align=1024) if plan.smem_bytes else None
    out_map = k.tensor_map("out_map") if plan.map else None     # with plan.map among the kernel's maps
    store = Store(k, spec, plan, out, extras, rows, staging, out_map)
    ...                                                         # once, or for every tile of a persistent CTA:
    cells = [Cell(16 * i, 8 * j, [sums[i][j]]) for i in … for j in …]
    store.tile(first_m, first_n, batch, cells)                  # the warp's first row and column, u32
    ...
    store.finish()                                              # before the kernel ends

`out` and `extras` are the kernel's pointers, without offsets; `rows` is how many rows there are (u32);
`batch` the indices of the matrix (u32). What lies outside the result is computed, never stored.

The plan chooses one of three ways: a tensor map (wgmma schedules, rows aligned to 16 bytes), 16 bytes a
thread from staged lines (mma schedules, the same), or each pair of elements by itself. `staging` is the
shared memory of the first two, at a multiple of 1024; it may be an address (u32) in memory that everybody has
ceased to use. Without it, or without the map the plan asks for, elements are stored by themselves. In `tile`
all warps of a warpgroup take part together (wgmma), or each warp for itself (mma); staging by warpgroups uses
the named barriers from `barrier` on, one for each.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.tile.access import advanced, read, write
from tinygrad_nv.tile.epilogue import Finish
from tinygrad_nv.tile.expression import Load, short
from tinygrad_nv.tile.gemm.spec import GemmSpec, Result
from tinygrad_nv.tile.lanes import FP8, Lanes
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.staging import Panel, Staged, panel_of


@dataclass(frozen=True)
class StorePlan:
    """How the result is stored. `edges_m`, `edges_n`: whether tiles reach beyond it. `batch_dimensions`:
    those of the batch that the map has."""
    edges_m: bool
    edges_n: bool
    panel: Panel | None = None
    smem_bytes: int = 0
    map: MapArgument | None = None
    batch_dimensions: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.panel is None: return "elements"
        how = "TMA" if self.map else "16 B a thread"
        return f"{how}, panels of {self.panel.lines} x {self.panel.line_bytes} B"


def store_plan(spec: GemmSpec, schedule: Schedule) -> StorePlan:
    """The plan for a product and a schedule's tile."""
    s, out = schedule, spec.out
    columns = s.block_n // spec.parts
    plan = StorePlan(spec.symbolic or spec.m % (s.block_m * s.cluster_m) != 0,
                     spec.n % (columns * s.cluster_n) != 0)
    if s.template == "gemv" or not out.major or out.operand("m").aligned_bytes < 16: return plan
    if s.template == "wgmma": group, warps, rows = 4, 4 * s.consumers, 64
    else: group, warps, rows, columns = 1, s.warps_m * s.warps_n, s.block_m // s.warps_m, columns // s.warps_n
    panel = panel_of(out.major, rows, columns, group, out.dtype.itemsize)
    if panel is None: return plan
    plan = replace(plan, panel=panel, smem_bytes=warps // group * 2 * panel.nbytes)
    if group == 4: return with_map(plan, spec)
    # lines end where a chunk of 16 bytes does
    along, edges = (spec.n, plan.edges_n) if out.major == "N" else (spec.m, plan.edges_m)
    partial = edges and (along * out.dtype.itemsize % 16 or (out.major == "M" and spec.symbolic))
    return replace(plan, panel=None, smem_bytes=0) if partial else plan


def with_map(plan: StorePlan, spec: GemmSpec) -> StorePlan:
    """The plan with a tensor map of the result."""
    out, panel, size = spec.out, plan.panel, spec.out.dtype.itemsize
    assert panel is not None
    batch = tuple(i for i, extent in enumerate(spec.batch) if extent > 1)
    extents, pitch = ((spec.n, spec.m), out.m) if out.major == "N" else ((spec.m, spec.n), out.n)
    made = MapArgument(0, map_dtype(spec), (*extents, *(spec.batch[i] for i in batch)),
                       (pitch * size, *(out.batch[i] * size for i in batch)),
                       (panel.span // size, panel.lines, *(1 for _ in batch)), f"{panel.span}B",
                       out.offset * size, -1 if not spec.symbolic else int(out.major == "N"))
    return replace(plan, map=made, batch_dimensions=batch)


def map_dtype(spec: GemmSpec) -> str:
    """The result's dtype as tensor maps name it."""
    dtype = spec.out.dtype
    if dtype in (*FP8, dtypes.int8, dtypes.bool): return "u8"
    return "u16" if dtype == dtypes.int16 else short(dtype)


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
    rows: Value | int
    staging: Shared | Value | None = None
    out_map: Value | None = None
    barrier: int = 8

    def tile(self, first_m: Value, first_n: Value, batch: Sequence[Value], cells: Sequence[Cell]) -> None:
        """Stores what a warp holds, whose first element is at (`first_m`, `first_n`) of the matrix."""
        share = Share(self, first_m, first_n, batch, cells)
        if self.staged: return Staged(share).run()
        # columns outside: what belongs to a row is needed throughout, and there are fewer rows
        for row, column in sorted(share.halves, key=lambda at: (at[1], at[0])):
            share.put(row, column, share.finish.at(row, column))
        return None

    @property
    def staged(self) -> bool:
        """Whether the result goes by way of shared memory."""
        mapped = (self.plan.map is None) == (self.out_map is None)
        return self.plan.panel is not None and self.staging is not None and mapped

    def finish(self) -> None:
        """Waits until shared memory may go."""
        if self.staged and self.out_map is not None: self.k.tma_wait(0, read=True)


class Share:
    """A warp's share of the result: what lies where, and what of it is inside. Rows and columns are counted
    from the lane's first pair."""

    def __init__(self, store: Store, first_m: Value, first_n: Value, batch: Sequence[Value],
                 cells: Sequence[Cell]) -> None:
        self.store, self.k, self.spec, self.batch = store, store.k, store.spec, batch
        self.finish = Finish(store.k, store.spec.epilogue, self)
        lane = self.k.special("laneid")
        self.m0, self.n0 = first_m, first_n
        self.m, self.n = first_m + (lane >> 2), first_n + ((lane & 3) << 1)
        self.halves = {(cell.row + 8 * h, cell.column): [part[2 * h:2 * h + 2] for part in cell.sums]
                       for cell in cells for h in range(2)}
        self.handed: dict[tuple[Load, int, int], Lanes] = {}  # what staging has read
        self.bases: dict[Load | None, Value] = {}
        self.inside: dict[tuple[str, ...], Value] = {}

    # **** what is inside ****

    def bounded(self, index: Value, offset: int, bound: Value | int) -> Value:
        """Whether `index` + `offset` is below a bound."""
        key = (index.name, str(offset))
        if key not in self.inside: self.inside[key] = (index + offset if offset else index) < bound
        return self.inside[key]

    def guard_at(self, m: Value, row: int | None, n: Value, column: int | None) -> Value | None:
        """A predicate that holds inside, of row `m` + `row` and column `n` + `column`; None where all is. A
        row or column left out is not asked for."""
        plan = self.store.plan
        in_m = self.bounded(m, row, self.store.rows) if plan.edges_m and row is not None else None
        in_n = self.bounded(n, column, self.spec.n) if plan.edges_n and column is not None else None
        if in_m is None or in_n is None: return in_m if in_n is None else in_n
        key = (in_m.name, in_n.name)
        if key not in self.inside: self.inside[key] = in_m & in_n
        return self.inside[key]

    def guard(self, row: int | None, column: int | None) -> Value | None:
        """The same of the lane's own rows and columns."""
        return self.guard_at(self.m, row, self.n, column)

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
        if (load, row, pair) in self.handed: return self.handed[load, row, pair]
        size, k = load.dtype.itemsize, self.k
        if load not in self.bases:
            self.bases[load] = self.base_at(self.store.extras[load.parameter], load, self.m, self.n)
        base, at = self.bases[load], (row * load.m + pair * load.n) * size
        on_row = row if load.m else None
        if not load.n: return read(k, base, at, load.dtype, 1, self.guard(on_row, None))
        strides = (load.m, load.offset, *load.batch)
        if load.n == 1 and self.whole_pairs() and not any(stride % 2 for stride in strides):
            return read(k, base, at, load.dtype, 2, self.guard(on_row, pair))
        return Lanes(k, load.dtype, [read(k, base, at + i * load.n * size, load.dtype, 1,
                                          self.guard(on_row, pair + i)).at(0) for i in range(2)])

    def base_at(self, pointer: Value, tensor: Load | Result, m: Value, n: Value) -> Value:
        """The address of row `m`, column `n` of a tensor with these strides."""
        size = tensor.dtype.itemsize
        base = pointer + tensor.offset * size if tensor.offset else pointer
        for index, stride in zip(self.batch, tensor.batch or [0] * len(self.batch), strict=True):
            base = advanced(self.k, base, index, stride * size)
        return advanced(self.k, advanced(self.k, base, m, tensor.m * size), n, tensor.n * size)

    # **** the result ****

    def put(self, row: int, pair: int, value: Lanes) -> None:
        """Stores a pair."""
        out, k, size = self.spec.out, self.k, self.spec.out.dtype.itemsize
        if None not in self.bases: self.bases[None] = self.base_at(self.store.out, out, self.m, self.n)
        base, at = self.bases[None], (row * out.m + pair * out.n) * size
        aligned = out.n == 1 and not any(stride % 2 for stride in (out.m, out.offset, *out.batch))
        if aligned and self.whole_pairs(): return write(k, base, at, value, 2, self.guard(row, pair))
        for i in range(2):
            write(k, base, at + i * out.n * size, value, 1, self.guard(row, pair + i), first=i)
        return None
