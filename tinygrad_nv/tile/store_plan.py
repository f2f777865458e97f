"""How a result is stored: in pairs of elements, or by panels in shared memory, by TMA or not.

`Share` is a warp's part of a result: what lies where, what of it is inside, what its epilogue reads.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.tile.access import advance, read, write
from tinygrad_nv.tile.epilogue import EpilogueEmitter
from tinygrad_nv.tile.expression import Load, short
from tinygrad_nv.tile.gemm.spec import Result, StoreTarget
from tinygrad_nv.tile.lanes import FP8, Lanes
from tinygrad_nv.tile.launch import MapArgument

SPANS = (128, 64, 32)


@dataclass(frozen=True)
class Panel:
    """`lines` lines of `line_bytes` bytes along `major`; `group` warps share one."""
    major: str
    lines: int
    line_bytes: int
    group: int

    @property
    def span(self) -> int:
        """The width of a column."""
        return span_of(self.line_bytes)

    @property
    def nbytes(self) -> int: return self.lines * self.line_bytes

    def extents(self, size: int) -> tuple[int, int]:
        """Its rows and columns of the result."""
        inner = self.line_bytes // size
        return (self.lines, inner) if self.major == "N" else (inner, self.lines)


def span_of(line_bytes: int) -> int:
    """The widest swizzle that lines can have; 0 for none."""
    return next((span for span in SPANS if line_bytes % span == 0), 0)


def panel_of(major: str, rows: int, columns: int, group: int, size: int) -> Panel | None:
    """The panel for a group whose tile has `rows` × `columns` elements of `size` bytes; None where its lines
    are no multiples of 32 bytes. Of M-major ones a line has all rows of the group."""
    if major == "N":
        span = span_of(columns * size)
        return Panel("N", 16 * group, span, group) if span else None
    line = rows * size
    lines = next((lines for lines in (64, 32, 16, 8) if columns % lines == 0
                  and (lines * line <= 2048 * group or lines == 8)), 0)
    return Panel("M", lines, line, group) if span_of(line) and lines else None


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


@dataclass(frozen=True)
class StoreTile:
    """How the sums of a CTA lie when they are stored. The result is covered by tiles of `rows` × `columns`, a
    CTA's or those of a cluster together. A CTA has `groups` groups of `warps` warps; each group holds
    `group_rows` × `group_columns`. A group is one warp, or the 4 of a warpgroup, which have 16 rows each and
    store by TMA."""
    rows: int
    columns: int
    groups: int
    warps: int
    group_rows: int
    group_columns: int


def warp_tile(rows: int, columns: int, warps_m: int, warps_n: int = 1) -> StoreTile:
    """A CTA's tile whose warps store for themselves."""
    return StoreTile(rows, columns, warps_m * warps_n, 1, rows // warps_m, columns // warps_n)


def store_plan(stored: StoreTarget, tile: StoreTile) -> StorePlan:
    """The plan for a result and a CTA's tile."""
    out = stored.out
    plan = StorePlan(stored.symbolic or stored.m % tile.rows != 0, stored.n % tile.columns != 0)
    if not out.major or out.operand("m").alignment_bytes < 16: return plan
    panel = panel_of(out.major, tile.group_rows, tile.group_columns, tile.warps, out.dtype.itemsize)
    if panel is None: return plan
    # lines end where a chunk of 16 bytes does: by TMA, too, which an H100 lets write all of the last chunk
    along, edges = (stored.n, plan.edges_n) if out.major == "N" else (stored.m, plan.edges_m)
    if edges and (along * out.dtype.itemsize % 16 or (out.major == "M" and stored.symbolic)): return plan
    plan = replace(plan, panel=panel, smem_bytes=tile.groups * 2 * panel.nbytes)
    return with_map(plan, stored) if tile.warps == 4 else plan


def with_map(plan: StorePlan, stored: StoreTarget) -> StorePlan:
    """The plan with a tensor map of the result."""
    out, panel, size = stored.out, plan.panel, stored.out.dtype.itemsize
    assert panel is not None
    batch = tuple(i for i, extent in enumerate(stored.batch) if extent > 1)
    extents, pitch = ((stored.n, stored.m), out.m) if out.major == "N" else ((stored.m, stored.n), out.n)
    made = MapArgument(0, map_dtype(out.dtype), (*extents, *(stored.batch[i] for i in batch)),
                       (pitch * size, *(out.batch[i] * size for i in batch)),
                       (panel.span // size, panel.lines, *(1 for _ in batch)), f"{panel.span}B",
                       out.offset * size, -1 if not stored.symbolic else int(out.major == "N"))
    return replace(plan, map=made, batch_dimensions=batch)


def map_dtype(dtype: DType) -> str:
    """A dtype as tensor maps name it."""
    if dtype in (*FP8, dtypes.int8, dtypes.bool): return "u8"
    return "u16" if dtype == dtypes.int16 else short(dtype)


@dataclass(frozen=True)
class Cell:
    """16 rows from `row`, 8 columns from `column` of what the warp holds: of each part, four registers."""
    row: int
    column: int
    sums: Sequence[Sequence[Value]]


@dataclass
class Destination:
    """Destination of a result, and how it goes there (result_store.py)."""
    kb: Kernel
    stored: StoreTarget
    plan: StorePlan
    out: Value
    extras: Sequence[Value]
    rows: Value | int
    staging: Shared | Value | None = None
    out_map: Value | None = None
    barrier: int = 8


class Share:
    """A warp's share of the result: what lies where, and what of it is inside. Rows and columns are counted
    from the lane's first pair."""

    def __init__(self, store: Destination, first_m: Value, first_n: Value, batch: Sequence[Value],
                 cells: Sequence[Cell]) -> None:
        self.store, self.kb, self.stored, self.batch = store, store.kb, store.stored, batch
        self.finish = EpilogueEmitter(store.kb, store.stored.epilogue, self)
        lane = self.kb.special("laneid")
        self.m0, self.n0 = first_m, first_n
        self.m, self.n = first_m + (lane >> 2), first_n + ((lane & 3) << 1)
        self.halves = {(cell.row + 8 * h, cell.column): [part[2 * h:2 * h + 2] for part in cell.sums]
                       for cell in cells for h in range(2)}
        self.handed: dict[tuple[Load, int, int], Lanes] = {}  # what staging has read
        self.bases: dict[Load | None, Value] = {}
        self.inside: dict[tuple[str, ...], Value] = {}

    # **** what is inside ****

    def is_below(self, index: Value, offset: int, bound: Value | int) -> Value:
        """Whether `index` + `offset` is below a bound."""
        key = (index.name, str(offset))
        if key not in self.inside: self.inside[key] = (index + offset if offset else index) < bound
        return self.inside[key]

    def guard_at(self, m: Value, row: int | None, n: Value, column: int | None) -> Value | None:
        """A predicate that holds inside, of row `m` + `row` and column `n` + `column`; None where all is. A
        row or column left out is not asked for."""
        plan = self.store.plan
        in_m = self.is_below(m, row, self.store.rows) if plan.edges_m and row is not None else None
        in_n = self.is_below(n, column, self.stored.n) if plan.edges_n and column is not None else None
        if in_m is None or in_n is None: return in_m if in_n is None else in_n
        key = (in_m.name, in_n.name)
        if key not in self.inside: self.inside[key] = in_m & in_n
        return self.inside[key]

    def guard(self, row: int | None, column: int | None) -> Value | None:
        """Returns the guard of the lane's own rows and columns."""
        return self.guard_at(self.m, row, self.n, column)

    def whole_pairs(self) -> bool:
        """Whether both elements of a pair are inside, or none."""
        return not self.store.plan.edges_n or self.stored.n % 2 == 0

    # **** what an epilogue reads ****

    def sums(self, part: int, row: int, pair: int) -> Sequence[Value]:
        return self.halves[row, pair][part]

    def position(self, axis: str | int, row: int, pair: int) -> Sequence[Value]:
        if axis == "m": return [(self.m + row).to("s32")]
        if axis == "n": return [(self.n + (pair + i)).to("s32") for i in range(2)]
        return [self.batch[int(axis)].to("s32")]

    def load(self, load: Load, row: int, pair: int) -> Lanes:
        if (load, row, pair) in self.handed: return self.handed[load, row, pair]
        size, kb = load.dtype.itemsize, self.kb
        if load not in self.bases:
            self.bases[load] = self.base_at(self.store.extras[load.parameter], load, self.m, self.n)
        base, at = self.bases[load], (row * load.m + pair * load.n) * size
        on_row = row if load.m else None
        if not load.n: return read(kb, base, at, load.dtype, 1, self.guard(on_row, None))
        strides = (load.m, load.offset, *load.batch)
        if load.n == 1 and self.whole_pairs() and not any(stride % 2 for stride in strides):
            return read(kb, base, at, load.dtype, 2, self.guard(on_row, pair))
        return Lanes(kb, load.dtype, [read(kb, base, at + i * load.n * size, load.dtype, 1,
                                          self.guard(on_row, pair + i)).at(0) for i in range(2)])

    def base_at(self, pointer: Value, tensor: Load | Result, m: Value, n: Value) -> Value:
        """The address of row `m`, column `n` of a tensor with these strides."""
        size = tensor.dtype.itemsize
        base = pointer + tensor.offset * size if tensor.offset else pointer
        for index, stride in zip(self.batch, tensor.batch or [0] * len(self.batch), strict=True):
            base = advance(self.kb, base, index, stride * size)
        return advance(self.kb, advance(self.kb, base, m, tensor.m * size), n, tensor.n * size)

    # **** the result ****

    def put(self, row: int, pair: int, value: Lanes) -> None:
        """Stores a pair."""
        out, kb, size = self.stored.out, self.kb, self.stored.out.dtype.itemsize
        if None not in self.bases: self.bases[None] = self.base_at(self.store.out, out, self.m, self.n)
        base, at = self.bases[None], (row * out.m + pair * out.n) * size
        aligned = out.n == 1 and not any(stride % 2 for stride in (out.m, out.offset, *out.batch))
        if aligned and self.whole_pairs(): return write(kb, base, at, value, 2, self.guard(row, pair))
        for i in range(2):
            write(kb, base, at + i * out.n * size, value, 1, self.guard(row, pair + i), first=i)
        return None
