"""Strips: operations of a loop that keep rows apart are computed for a few rows at a time.

Protocol: `find_strips(op, isa)` is of a loop with dots, whose results other operations of the loop read. What
depends on the rows of these results is `striped`, where no such operation mixes rows: the iteration computes
the rest of its operations first, and packs what the dots multiply by, then goes through the striped ones once
for each strip of `count` rows. Scores of a strip stay in the first cache from a dot to the next.

`find_stores` are the stores of all that a loop makes of its rows, where nothing else reads them: rows that
none of these writes, beyond the last of a tensor or of a mask, need not be computed.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from tinygrad_nv.cpu.gemm.blocked.blocks import registers
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.tile.language.ir import STORES, Op, Region, Value

ELEMENTS = ("apply", "cast", "bitcast")
WIDE = 64           # columns of scores: more vectors than registers have beside each other
SUMS = 12           # vectors of sums that keep two units of four cycles busy, and a half more
MOST_VECTORS = 5    # of rows in a strip: of more the scores leave the first cache


@dataclass(frozen=True)
class Strips:
    """Rows of a loop's dots, by `count`: operations of its body that are computed strip by strip, and all
    values that have the same rows, those that the loop carries too. `row` is the first of a strip, in C."""
    rows: int
    count: int
    ops: tuple[Op, ...]
    values: Set[Value]
    row: str = ""

    @property
    def end(self) -> str:
        """The row after a strip's last, in C."""
        last = f"{self.row} + {self.count}"
        return last if self.rows % self.count == 0 else f"({last} < {self.rows} ? {last} : {self.rows})"


def strip_rows(isa: ISA) -> int:
    """Returns the fewest rows that are whole vectors, and whole blocks of registers with sums enough, or as
    many as can be."""
    def sums(count: int) -> int:
        rows, columns = registers(count, WIDE, isa)
        return min(rows * columns, SUMS * isa.lanes) if count % rows == 0 else 0
    return max((isa.lanes * number for number in range(1, MOST_VECTORS + 1)), key=sums)


def find_strips(op: Op, isa: ISA) -> Strips | None:
    """The strips of a `for`; None where there are none."""
    region = op.regions[0]
    dots = [each for each in region.ops if each.name == "dot"]
    count = strip_rows(isa)
    read = {each for one in region.walk() for each in one.operands}
    if not any(each.result in read for each in dots): return None
    rows = dots[0].result.shape[0]
    if rows <= count or any(each.result.shape[0] != rows for each in dots): return None
    if any(each.name in STORES or each.name == "barrier" for each in region.walk()): return None
    values = _follow(region, rows, {each.result for each in dots})
    if values is None: return None
    striped = {each for each in region.ops if any(result in values for result in each.results)}
    _add_makers(region, rows, striped)
    for each in list(striped):
        values.update(each.results)
        for inner in each.regions: values |= _follow_inside(inner, values)
    return Strips(rows, count, tuple(each for each in region.ops if each in striped), values)


def _follow(region: Region, rows: int, values: set[Value]) -> set[Value] | None:
    """Returns all that depends on rows of some values, and what a loop carries of it; None where rows are
    mixed."""
    carried = list(zip(region.arguments[1:], region.yields, strict=True))
    before = 0
    while before != len(values):
        before = len(values)
        for argument, made in carried:
            if argument in values or made in values: values |= {argument, made}
        for op in region.ops:
            if not any(each in values for each in _reads(op)): continue
            if not _keeps_rows(op, rows, values): return None
            values.update(op.results)
    makers = {result for op in region.ops for result in op.results}
    ends = [made for argument, made in carried if argument in values]
    arguments = {argument for argument, _ in carried}
    if any(each.shape[:1] != (rows,) for each in values): return None
    return values if all(each in makers for each in ends) and not arguments & set(ends) else None


def _reads(op: Op) -> list[Value]:
    """Returns all values from outside that an operation reads."""
    inner = [one for region in op.regions for each in region.walk() for one in each.operands]
    return [*op.operands, *inner, *(each for region in op.regions for each in region.yields)]


def _keeps_rows(op: Op, rows: int, values: Set[Value]) -> bool:
    """Whether each row of what an operation makes is of the same row of what it reads of `values`."""
    if any(each.shape[:1] != (rows,) for each in op.results): return False
    if op.name in ELEMENTS: return True
    if op.name == "broadcast": return len(op.operands[0].shape) == len(op.result.shape)
    if op.name == "reshape": return op.operands[0].shape[:1] == (rows,)
    if op.name == "reduce":
        return not op.regions and len(op.operands[0].shape) == 2 and op.attributes["axis"] == 1
    if op.name == "dot":
        a, b, _ = op.operands
        return b not in values and a.dtype == b.dtype
    return op.name == "if" and op.operands[0] not in values and all(
        _keeps_inside(each, rows, values) for each in op.regions)


def _keeps_inside(region: Region, rows: int, outer: Set[Value]) -> bool:
    """Whether a branch keeps rows apart."""
    values = outer | _follow_inside(region, outer)
    return all(op.name not in ("dot", "if") and _keeps_rows(op, rows, values)
               for op in region.ops if any(each in values for each in _reads(op)))


def _follow_inside(region: Region, outer: Set[Value]) -> set[Value]:
    """Returns what a branch computes of values."""
    values = set(outer)
    for op in region.ops:
        if any(each in values for each in _reads(op)): values.update(op.results)
    return values - outer


def _add_makers(region: Region, rows: int, striped: set[Op]) -> None:
    """Adds operations on elements that striped ones alone read, of which whole tiles would be arrays."""
    users: dict[Value, list[Op]] = {}
    for op in region.ops:
        for each in _reads(op): users.setdefault(each, []).append(op)
    for op in reversed(region.ops):
        if op.name not in (*ELEMENTS, "broadcast", "load_block") or op in striped: continue
        if op.result.shape[:1] != (rows,) or len(op.result.shape) != 2 or op.result in region.yields: continue
        values = {each for one in striped for each in one.results} | {op.result}
        if (found := users.get(op.result)) and all(_reads_rows(each, op.result, rows, values, striped)
                                                   for each in found): striped.add(op)


def _reads_rows(op: Op, value: Value, rows: int, values: Set[Value], striped: Set[Op]) -> bool:
    """Whether a striped operation reads rows of a value as its own, inside of a branch too."""
    if op not in striped or (op.name == "dot" and value is op.operands[1]): return False
    return all(_keeps_inside(each, rows, values) for each in op.regions)


def find_stores(op: Op, strips: Strips, users: Mapping[Value, Sequence[Op]]) -> list[tuple[Op, int]]:
    """Returns the stores, and the axis of each along which rows lie; empty where anything else reads them."""
    given = zip(op.results, op.regions[0].arguments[1:], strict=True)
    left = [result for result, argument in given if argument in strips.values]
    values, found = set(left), list[tuple[Op, int]]()
    while left:
        value = left.pop()
        for user in users.get(value, ()):
            if user.name in ("store", "store_block"):
                sizes = user.attributes.get("sizes", (strips.rows,))
                found.append((user, next(axis for axis, size in enumerate(sizes) if size)))
                continue
            if not _keeps_rows(user, strips.rows, values | set(user.results)): return []
            left += [each for each in user.results if each not in values]
            values.update(user.results)
    return found
