"""The rows of a CTA's tile of a group, for kernels of few rows: to shared memory, and results to places.

Protocol: rows of a tile that the group lacks are zeros in shared memory, and stored nowhere.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.epilogue import store_element
from tinygrad_nv.tile.gemm.gemv.epilogue import Columns, GemvEpilogue
from tinygrad_nv.tile.gemm.gemv.kernel import x_width
from tinygrad_nv.tile.grouped_gemm.epilogue import GroupedEpilogue
from tinygrad_nv.tile.grouped_gemm.work import Tile


def gather_rows(kb: Kernel, plan: Columns, finish: GroupedEpilogue, tile: Tile, first: Value, span: int,
             pitch_bytes: int, target: Value, read: str) -> None:
    """Copies `span` columns of the tile's rows of x, from column `first` (u32) on, to shared memory at
    `target`, zeros beyond the last row and beyond K; `read` loads what is too narrow for cp.async."""
    spec = finish.spec
    size, rows = spec.dtype.itemsize, range(plan.spec.m)
    width = x_width(plan.spec.a, spec.k)
    elements = width // size
    there = [tile.rows > row for row in rows]
    sources = [advance(kb, finish.x, finish.source(tile.first + row, guard), spec.k * size)
               for row, guard in zip(rows, there, strict=True)]
    with kb.loop(kb.tid.x * elements, span, plan.threads * elements, kind="u32") as at:
        column = first + at
        inside, nbytes = column < spec.k, column.to("u64") * size
        for row, (guard, source) in enumerate(zip(there, sources, strict=True)):
            place = (target + at * size).at(row * pitch_bytes)
            _copy(kb, place, kb.select(guard, source, finish.x) + nbytes, width, guard & inside, read)
    if width >= 4: kb.emit("cp.async.wait_all")
    kb.sync()


def _copy(kb: Kernel, place: object, source: Value, width: int, inside: Value, read: str) -> None:
    """`width` bytes to shared memory; zeros, and nothing is read, where they are not inside."""
    if width >= 4:
        cache, some = "cg" if width == 16 else "ca", kb.select(inside, width, 0, "u32")
        kb.emit(f"cp.async.{cache}.shared.global", place, source.at(), width, some)
        return
    value = kb.reg("b16", 0)
    kb.emit(f"{read}.b16", value, source.at(), guard=inside)
    kb.emit("st.shared.b16", place, value)


class GroupEpilogue(GemvEpilogue):
    """Stores rows of a group."""

    def __init__(self, finish: GroupedEpilogue, tile: Tile, *kernel: Any) -> None:
        super().__init__(*kernel)
        self.finished, self.tile, self.grouped = finish, tile, finish.spec

    def store(self, m: Value, n: Value, sums: Sequence[Value]) -> None:
        kb, spec, finish = self.kb, self.grouped, self.finished
        row = self.tile.first + m
        slot = finish.slot(row)
        bias = [each[0] for each in finish.biases(self.tile.group, n, [None], pairs=False)]
        made = finish.value(sums, bias, finish.weight(slot))
        size = spec.dtype.itemsize
        at = advance(kb, advance(kb, self.out, finish.place(row, slot), spec.columns * size), n, size)
        store_element(kb, at, made, spec.dtype)
