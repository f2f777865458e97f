"""Epilogue of consumers with the sums of a tile: bias, activation, weight, and whole lines to the rows'
places.

Protocol: registers 4j … 4j + 3 of a wgmma's sums are columns 8j … 8j + 7 of its 64 rows, of which warp p of
the warpgroup has 16 from 16p (gemm/wgmma/store.py). Results go by way of shared memory, a `Panel` at a time,
to 16 bytes a thread of whole lines:

    RowStore      columns of wgmma are columns of the result: each warp has panels of 16 rows
    ColumnStore   columns of wgmma are rows (swap): a warpgroup has a panel of all rows by 64 columns, which
                  stmatrix transposes

What no thread may store, rows of the next group and columns beyond the last, is computed all the same. What
rows need (weights, places) is read at the end of a tile: the main loop has no registers for it.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.gemm.wgmma.main_loop import Sums
from tinygrad_nv.tile.gemm.wgmma.plan import WARPGROUP
from tinygrad_nv.tile.grouped_gemm.epilogue import activate
from tinygrad_nv.tile.grouped_gemm.wgmma.plan import CHUNK, LANES, GroupedPlan
from tinygrad_nv.tile.grouped_gemm.wgmma.tile_scheduler import GroupTile
from tinygrad_nv.tile.lanes import FLOAT16S, pack
from tinygrad_nv.tile.result_store import Lines

BARRIER = 8     # the named barrier of the first consumer
Halves = tuple[Value, ...]  # an element of gate and of up, or of the result alone


class GroupedStore(ABC):
    """The epilogue of a consumer; see the module."""

    def __init__(self, kb: Kernel, plan: GroupedPlan, pointers: Mapping[str, Value]) -> None:
        self.kb, self.plan, self.spec, self.pointers = kb, plan, plan.grouped, pointers
        self.size = self.spec.out.itemsize
        self.staging = kb.shared("staging", plan.staging_bytes, align=1024)

    @abstractmethod
    def store(self, tile: GroupTile, consumer: Value, sums: Sums) -> None:
        """Stores the sums of a tile, or of a consumer's share of it."""

    # **** elements ****

    def result(self, values: Halves, bias: Sequence[Value], weight: Value | None) -> Value:
        """One element, not yet rounded."""
        if bias: values = tuple(each + more for each, more in zip(values, bias, strict=True))
        made = activate(self.kb, self.spec.activation, *values) if self.spec.activation else values[0]
        return made if weight is None else made * weight

    def slot(self, row: Value) -> Value:
        """Returns the order's entry of a row."""
        return self.kb.ld("global", "u32", advance(self.kb, self.pointers["order"], row, 4).at())[0]

    def weight(self, row: Value) -> Value | None:
        """Returns the weight of a row."""
        if not self.spec.weighted: return None
        at = advance(self.kb, self.pointers["weights"], self.slot(row), 4)
        return self.kb.ld("global", "f32", at.at())[0]

    def inside(self, column: Value, more: int = 0) -> Value | None:
        """Whether the result has a column; None where all of a tile are inside."""
        if self.spec.columns % self.plan.tile_columns == 0: return None
        return column + more < self.spec.columns

    def bias(self, tile: GroupTile, column: Value) -> Value:
        """Returns the address at which the bias of a column of the result is."""
        first = tile.group * self.spec.n + column
        return advance(self.kb, self.pointers["bias"], first, self.size)

    def wide(self, half: Value) -> Value:
        """An element as float32."""
        made = self.kb.reg("f32")
        self.kb.emit(f"cvt.f32.{FLOAT16S[self.spec.out]}", made, half)
        return made

    # **** lines ****

    def clamp_row(self, row: Value, tile: GroupTile) -> Value:
        """A row, or the last of the group."""
        made = self.kb.reg("u32")
        self.kb.emit("min.u32", made, row, tile.end - 1)
        return made

    def line(self, row: Value, tile: GroupTile, column: Value) -> Value:
        """Returns the address at which a row of the result begins, from a column on."""
        place = self.slot(self.clamp_row(row, tile)) if self.spec.scatter else row
        start = advance(self.kb, self.pointers["out"], place, self.spec.columns * self.size)
        return advance(self.kb, start, column, self.size)

    def copy_chunk(self, source: MemoryOperand, line: Value, nbytes: int, guard: Value, beyond: bool) -> None:
        """16 bytes of a panel to a line; `beyond`: the panel may end before the source."""
        words = self.kb.regs("b32", 4, 0) if beyond else self.kb.regs("b32", 4)
        self.kb.emit("ld.shared.v4.b32", words, source, guard=guard if beyond else None)
        self.kb.emit("st.global.v4.b32", line.at(nbytes), words, guard=guard)


class RowStore(GroupedStore):
    """Panels of 16 rows, a warp each."""

    def store(self, tile: GroupTile, consumer: Value, sums: Sums) -> None:
        kb, plan = self.kb, self.plan
        warp = kb.tid.x >> 5
        base = self.staging.address() + warp * plan.panel.nbytes
        first = tile.row + warp % 4 * 16
        if plan.readers > 1: first = first + consumer * plan.rows
        for i, row in enumerate(sums):
            start = first + 64 * i if i else first
            with kb.if_(start < tile.end): self._rows(tile, start, base, row)

    def _rows(self, tile: GroupTile, first: Value, base: Value, sums: Sequence[Value]) -> None:
        """16 rows from `first` on."""
        kb, panel, lane = self.kb, self.plan.panel, self.kb.special("laneid")
        weights = [self.weight(self.clamp_row(first + (lane >> 2) + 8 * h, tile)) for h in range(2)]
        a_line = panel.span // CHUNK
        matrices = Lines(kb, panel, base, lane & 15, (lane >> 4) * CHUNK)
        chunks = Lines(kb, panel, base, lane // a_line, lane % a_line * CHUNK)
        column = tile.column + chunks.byte // self.size
        steps = range(0, panel.lines, LANES // a_line)
        rows = [first + chunks.line + step for step in steps]
        lines, there = [self.line(row, tile, column) for row in rows], [row < tile.end for row in rows]
        width = panel.span // self.size
        for start in range(0, self.plan.tile_columns, width):
            if start: kb.emit("bar.warp.sync", -1)
            for j in range(start // 8, (start + width) // 8, 2):
                biases = [self._biases(tile, j + more) for more in range(2)]
                words = [self._pair(sums, biases[more], weights[h], j + more, h)
                         for more in range(2) for h in range(2)]
                kb.stmatrix(matrices.at(0, 8 * j * self.size - start * self.size, 0), words)
            kb.emit("bar.warp.sync", -1)
            inside = self.inside(column, start)
            for step, line, guard in zip(steps, lines, there, strict=True):
                self.copy_chunk(chunks.at(step, 0, 0), line, start * self.size,
                            guard if inside is None else guard & inside, False)
        kb.emit("bar.warp.sync", -1)

    def _pair(self, sums: Sequence[Value], biases: Sequence[Sequence[Value]], weight: Value | None, j: int,
              h: int) -> Value:
        """Two neighbours in a row of eight columns number `j`, rounded."""
        halves = [sums[self.plan.tile_columns // 2 * half + 4 * j + 2 * h:][:2]
                  for half in range(self.spec.halves)]
        made = [self.result(tuple(each[i] for each in halves), [each[i] for each in biases], weight)
                for i in range(2)]
        return pack(self.kb, made, self.spec.out)

    def _biases(self, tile: GroupTile, j: int) -> list[list[Value]]:
        """Returns, of each half, the biases of a lane's two columns of eight number `j`."""
        if not self.spec.biased: return []
        kb, made = self.kb, []
        column = tile.column + ((kb.special("laneid") & 3) << 1)
        inside, at = self.inside(column, 8 * j), self.bias(tile, column)
        for half in range(self.spec.halves):
            pair = kb.regs("b16", 2, 0)
            kb.emit("ld.global.v2.b16", pair, at.at((half * self.spec.columns + 8 * j) * self.size),
                    guard=inside)
            made.append([self.wide(each) for each in pair])
        return made


class ColumnStore(GroupedStore):
    """Panels of all rows by 64 columns, a warpgroup each."""

    def store(self, tile: GroupTile, consumer: Value, sums: Sums) -> None:
        kb, plan, spec = self.kb, self.plan, self.spec
        panel, lane, warp = plan.panel, kb.special("laneid"), kb.tid.x % WARPGROUP >> 5
        number = consumer if plan.consumers > 1 else kb.reg("u32", 0)
        base = self.staging.address() + number * panel.nbytes
        share = 64 * len(sums) // spec.halves
        first = tile.column if plan.readers == 1 else tile.column + consumer * share
        thread = kb.tid.x % WARPGROUP
        a_line = panel.line_bytes // CHUNK
        # x4: two rows' eights by two columns' eights
        matrices = Lines(kb, panel, base, (lane & 7) + (lane >> 4) * 8,
                         warp * (16 * self.size) + (lane >> 3 & 1) * CHUNK)
        chunks = Lines(kb, panel, base, thread // a_line, thread % a_line * CHUNK)
        steps = range(0, panel.lines, WARPGROUP // a_line)
        rows = [tile.row + chunks.line + step for step in steps]
        column = first + chunks.byte // self.size
        lines, there = [self.line(row, tile, column) for row in rows], [row < tile.end for row in rows]
        beyond = panel.lines % (WARPGROUP // a_line) != 0
        if beyond:
            there[-1] = there[-1] & (chunks.line < panel.lines % (WARPGROUP // a_line))
        for i in range(len(sums) // spec.halves):
            biases = self._biases(tile, first + (warp * 16 + 64 * i) + (lane >> 2))
            halves = [sums[i + half * (len(sums) // spec.halves)] for half in range(spec.halves)]
            kb.sync(BARRIER + number, WARPGROUP)
            for j in range(0, panel.lines // 8, 2):
                words = []
                for eight in range(j, min(j + 2, panel.lines // 8)):
                    weights = self._weights(tile, eight)
                    words += [self._pair(halves, biases, weights, eight, h) for h in range(2)]
                kb.stmatrix(matrices.at(8 * j, 0, 0), words, trans=True)
            kb.sync(BARRIER + number, WARPGROUP)
            inside = self.inside(column, 64 * i)
            for step, line, guard in zip(steps, lines, there, strict=True):
                self.copy_chunk(chunks.at(step, 0, 0), line, 64 * i * self.size,
                            guard if inside is None else guard & inside, beyond and step == steps[-1])

    def _weights(self, tile: GroupTile, j: int) -> list[Value | None]:
        """Returns the weights of a lane's two rows of eight number `j`."""
        row = tile.row + ((self.kb.special("laneid") & 3) << 1)
        return [self.weight(self.clamp_row(row + (8 * j + i), tile)) if self.spec.weighted else None
                for i in range(2)]

    def _biases(self, tile: GroupTile, column: Value) -> list[list[Value]]:
        """Returns, of each half, the biases of a lane's two columns, eight apart."""
        if not self.spec.biased: return []
        kb, at, made = self.kb, self.bias(tile, column), []
        for half in range(self.spec.halves):
            both = kb.regs("b16", 2, 0)
            for h, each in enumerate(both):
                kb.emit("ld.global.b16", each, at.at((half * self.spec.columns + 8 * h) * self.size),
                        guard=self.inside(column, 8 * h))
            made.append([self.wide(each) for each in both])
        return made

    def _pair(self, halves: Sequence[Sequence[Value]], biases: Sequence[Sequence[Value]],
              weights: Sequence[Value | None], j: int, h: int) -> Value:
        """Two neighbouring rows of eight number `j` in a lane's column `h`, rounded."""
        made = [self.result(tuple(each[4 * j + 2 * h + i] for each in halves), [each[h] for each in biases],
                            weights[i]) for i in range(2)]
        return pack(self.kb, made, self.spec.out)
