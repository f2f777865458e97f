"""A warp's share of a result: what lies where, what of it is inside, what its epilogue reads."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.tile.access import advance, read, write
from tinygrad_nv.tile.epilogue import EpilogueEmitter
from tinygrad_nv.tile.expression import Load
from tinygrad_nv.tile.gemm.spec import Result, StoreTarget
from tinygrad_nv.tile.lanes import Lanes
from tinygrad_nv.tile.store_plan import StorePlan


@dataclass(frozen=True)
class Cell:
    """16 rows from `row`, 8 columns from `column` of what the warp holds: of each part, four registers."""
    row: int
    column: int
    sums: Sequence[Sequence[Value]]


@dataclass
class Destination:
    """Destination of a result, and how it goes there (store.py)."""
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
