"""Dots in ordinary arithmetic: of float32, and of tiles too small for tensor cores.

Protocol: sums are in the layout `spread`. For each four or so of k a thread reads, from shared memory, its
rows of the left operand and its columns of the right one, 16 bytes at once where they lie side by side, and
multiplies all with all, in the order of k: in a loop over columns of their tiles, or over ROWS rows, which is
unrolled inside.
"""
from __future__ import annotations

from collections.abc import Mapping

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Value as Register
from tinygrad_nv.tile.lanes import Number
from tinygrad_nv.tile.language.gpu.access import fetch
from tinygrad_nv.tile.language.gpu.convert import Writer
from tinygrad_nv.tile.language.gpu.dots import DotPlan, Role
from tinygrad_nv.tile.language.gpu.layout import Layout, extents
from tinygrad_nv.tile.language.gpu.staged import SharedOperand
from tinygrad_nv.tile.ops import CHUNK, Places, swizzle_offset

ROWS = 32               # of k, of operands of which none has them side by side
ROWS_OF_SWIZZLE = 8     # rows after which a tile is swizzled as before


def multiply_add(writer: Writer, plan: DotPlan, layout: Layout, sums: Mapping[int, Register],
               left: tuple[SharedOperand, Role], right: tuple[SharedOperand, Role]) -> None:
    """Adds the products of two operands to sums, by their registers."""
    kb, of = writer.kb, extents((plan.m, plan.n))
    sides = [_Side(writer, layout, (plan.m, plan.n), *each) for each in (left, right)]
    integer = left[0].dtype in (dtypes.int8, dtypes.uint8)
    opcode = "mad.lo.s32" if integer else "fma.rn.f32"

    def multiply(count: int) -> None:
        for k in range(count):
            for register, total in sums.items():
                index = layout.indices[register]
                a, b = (side.element(of.coordinate(index, axis), k) for axis, side in enumerate(sides))
                kb.emit(opcode, total, a, b, total)
    at_once = max((side.k_at_once for side in sides if side.k_at_once), default=ROWS)
    alike = all(side.k_at_once in (0, at_once) for side in sides)
    if not alike or at_once % ROWS_OF_SWIZZLE or plan.k % at_once or plan.k == at_once:
        return multiply(plan.k)
    with kb.loop(0, plan.k // at_once):
        for side in sides: side.begin()
        multiply(at_once)
        for side in sides: side.advance(at_once)
    return None


class _Side:
    """An operand: elements by a register's row (or column) and k. The last ones read are kept."""

    def __init__(self, writer: Writer, layout: Layout, shape: tuple[int, int], found: SharedOperand,
                 role: Role) -> None:
        kb, self.writer, self.kb, self.found, self.role = writer.kb, writer, writer.kb, found, role
        self.size = found.dtype.itemsize
        own = writer.threads.coordinate(layout, shape, role.side)
        with writer.threads.prelude():
            mn, zero = kb.reg("u32"), kb.reg("u32", 0)
            kb.emit("mov.b32", mn, own)
            row, column = (zero, mn) if role.mn_major else (mn, zero)
            self.places = Places(kb, found.tile, swizzle_offset(found.tile, row, column * self.size))
        self.start = kb.reg("u32", found.address(writer))
        # of k in one column of the tile; 0 where rows of the tile are k
        self.k_at_once = 0 if role.mn_major else found.tile.span // self.size
        of = extents(shape)
        most = min(CHUNK // self.size, found.tile.row_bytes // self.size)
        self.count = most
        if role.mn_major: self.count = min(layout.run(of.of_axis(1)), most) if role.side else 1
        self.begin()

    def begin(self) -> None:
        """Reads from where the operand begins."""
        self.places.at_stage(self.start)
        self.known: dict[tuple[int, int], list[Number]] = {}

    def advance(self, count: int) -> None:
        """Moves on by so many of k: whole columns of the tile, or rows."""
        tile = self.found.tile
        self.start += count * tile.span if self.role.mn_major else tile.rows * tile.span

    def element(self, mn: int, k: int) -> Number:
        """Returns what is `mn` after the thread's own row or column, at `k`."""
        along, other = (mn, k) if self.role.mn_major else (k, mn)
        first = along - along % self.count
        key = (first, other)
        if key not in self.known:
            if not self.role.mn_major or not any(place[1] == k for place in self.known): self._forget(k)
            tile = self.found.tile
            at = self.places(tile.plain(other, first * self.size))
            assert isinstance(at.base, Register)
            parts = fetch(self.kb, at.base, at.offset, self.found.dtype, self.count, space="shared")
            self.known[key] = [part.at(i) for part in parts for i in range(2 if self.count > 1 else 1)]
        return self.known[key][along - first]

    def _forget(self, k: int) -> None:
        """Drops what earlier k read."""
        if self.role.mn_major: self.known = {key: each for key, each in self.known.items() if key[1] == k}
        else: self.known = {key: each for key, each in self.known.items() if key[0] == k - k % self.count}
