"""Epilogues of a round's sums: they are stored, or a residual is added and rows are normalized (spec.py).

Protocol: `write(first, count, threads, sums)` goes through a round's vectors, which lie from vector `first`
of the message on; `sums(i)` emits what makes vector `i` of the round, in a thread that needs it.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.all_reduce.schedules import AllReduceSchedule
from tinygrad_nv.tile.all_reduce.spec import VECTOR_BYTES, AllReduceSpec
from tinygrad_nv.tile.all_reduce.vectors import (
    WORDS,
    Words,
    add_vectors,
    elements,
    load,
    store,
    store_elements,
    vector,
)
from tinygrad_nv.tile.lanes import across

Sums = Callable[[Value], Words]


class Epilogue(Protocol):
    """Epilogue of the sums."""

    def write(self, first: Value, count: Value, threads: int, sums: Sums) -> None:
        """The results of a round."""


class Plain:
    """The sums themselves."""

    def __init__(self, kb: Kernel, spec: AllReduceSpec, out: Value) -> None:
        self.kb, self.spec, self.out = kb, spec, out

    def write(self, first: Value, count: Value, threads: int, sums: Sums) -> None:
        kb = self.kb
        with kb.comment("sums to the result"), kb.loop(kb.tid.x, count, threads, kind="u32") as i:
            self.put(first + i, sums(i))

    def put(self, at: Value, words: Words) -> None:
        """Vector `at` of the message; of the last one what there is."""
        kb, spec = self.kb, self.spec
        target = advance(kb, self.out, at, VECTOR_BYTES)
        if not (rest := spec.count % spec.of_vector):
            store(kb, target.at(), words)
            return
        with kb.if_(at < spec.vectors - 1): store(kb, target.at(), words)
        with kb.else_(): store_elements(kb, target, words, rest, spec.dtype)


class ResidualNorm:
    """Rows: residual added, RMSNorm. A CTA has one row after the other, a thread vectors of it in registers.
    """

    def __init__(self, kb: Kernel, spec: AllReduceSpec, s: AllReduceSchedule, out: Value,
                 residual_out: Value, residual: Value, weight: Value) -> None:
        self.kb, self.spec, self.out = kb, spec, out
        self.residual_out, self.residual, self.weight = residual_out, residual, weight
        self.row, self.warps = spec.columns // spec.of_vector, s.threads // 32
        self.parts = kb.shared("parts", 4 * self.warps)

    def write(self, first: Value, count: Value, threads: int, sums: Sums) -> None:
        kb, spec = self.kb, self.spec
        chunks, columns = range(-(-self.row // threads)), list[Value]()
        with kb.comment("rows"), kb.loop(0, count, self.row, kind="u32") as start:
            squares, rows = kb.reg("f32", 0.0), [kb.regs("b32", WORDS) for _ in chunks]
            for chunk, row in enumerate(rows):
                columns.append(kb.tid.x + chunk * threads)
                with kb.if_(columns[chunk] < self.row):
                    self.new(first, start + columns[chunk], sums, row)
                    for value in elements(kb, row, spec.dtype):
                        kb.emit("fma.rn.f32", squares, value, value, squares)
            scale = self.scale(squares)
            for column, row in zip(columns, rows, strict=True):
                with kb.if_(column < self.row): self.normalize(first + (start + column), column, row, scale)

    def new(self, first: Value, at: Value, sums: Sums, into: Words) -> None:
        """A vector of the new residual, at vector `at` of the round."""
        kb, dtype = self.kb, self.spec.dtype
        more = load(kb, advance(kb, self.residual, first + at, VECTOR_BYTES).at())
        made = add_vectors(elements(kb, sums(at), dtype), elements(kb, more, dtype))
        for word, each in zip(into, vector(kb, made, dtype), strict=True): word.set(each)
        store(kb, advance(kb, self.residual_out, first + at, VECTOR_BYTES).at(), into)

    def normalize(self, at: Value, column: Value, row: Words, scale: Value) -> None:
        """A vector of a normalized row, at vector `at` of the message."""
        kb, dtype = self.kb, self.spec.dtype
        weight = load(kb, advance(kb, self.weight, column, VECTOR_BYTES).at())
        scaled = vector(kb, [value * scale for value in elements(kb, row, dtype)], dtype)
        made = [a * b for a, b in zip(elements(kb, scaled, dtype), elements(kb, weight, dtype), strict=True)]
        store(kb, advance(kb, self.out, at, VECTOR_BYTES).at(), vector(kb, made, dtype))

    def scale(self, squares: Value) -> Value:
        """1 / √(mean + eps), of what all threads of the CTA have: the same order in every GPU."""
        kb = self.kb
        warp, lane = kb.tid.x >> 5, kb.tid.x & 31
        total = across(kb, squares, "add.f32")
        kb.emit("st.shared.f32", self.parts.address(warp * 4).at(), total, guard=lane == 0)
        kb.sync()
        part = kb.reg("f32", 0.0)
        kb.emit("ld.shared.f32", part, self.parts.address(lane * 4).at(), guard=lane < self.warps)
        kb.sync()  # all have read before the next row's are written
        root, made = kb.regs("f32", 2)
        mean = across(kb, part, "add.f32") * (1 / self.spec.columns) + self.spec.eps
        kb.emit("sqrt.rn.f32", root, mean)
        kb.emit("rcp.rn.f32", made, root)
        return made
