"""Epilogue of an element's sums: bias, activation, weight, and the place of a row (spec.py).

Protocol: a `GroupedEpilogue` knows the pointers that a spec has. `slot(i)` is the slot of row i, `source(i)`
its row of x, `place(i, slot)` that of the result.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance, read
from tinygrad_nv.tile.grouped_gemm.activation import activate
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec


class GroupedEpilogue:
    """The kernel's parameters after out: x, the `matrices`, offsets, and those there are of order, weights,
    bias."""

    def __init__(self, kb: Kernel, spec: GroupedGemmSpec, matrices: Iterable[str] = ("w",)) -> None:
        self.kb, self.spec = kb, spec
        self.x = kb.pointer("x")
        self.matrices = {name: kb.pointer(name) for name in matrices}
        self.offsets = kb.pointer("offsets")
        self.order = kb.pointer("order") if spec.has_order else None
        self.weights = kb.pointer("weights") if spec.weighted else None
        self.bias = kb.pointer("bias") if spec.biased else None

    def slot(self, row: Value) -> Value:
        """u32; the row itself where there is no order."""
        if self.order is None: return row
        return self.kb.ld("global", "u32", advance(self.kb, self.order, row, 4).at())[0]

    def source(self, row: Value, guard: Value | None = None) -> Value:
        """u32; of rows that are not there 0."""
        if not self.spec.gather or self.order is None: return row
        slot = self.kb.reg("u32", 0)
        self.kb.emit("ld.global.u32", slot, advance(self.kb, self.order, row, 4).at(), guard=guard)
        return slot // self.spec.gather

    def place(self, row: Value, slot: Value) -> Value:
        """u32."""
        return slot if self.spec.scatter else row

    def weight(self, slot: Value) -> Value | None:
        """f32; None where rows have none."""
        if self.weights is None: return None
        return self.kb.ld("global", "f32", advance(self.kb, self.weights, slot, 4).at())[0]

    def biases(self, group: Value, column: Value, inside: Sequence[Value | None],
               pairs: bool) -> list[list[Value]]:
        """f32 of a column, or of two side by side, where they are inside, for each half; together where
        `pairs`. Nothing where there is none."""
        if self.bias is None: return []
        spec, size = self.spec, self.spec.dtype.itemsize
        at = advance(self.kb, advance(self.kb, self.bias, group, spec.n * size), column, size)
        made = []
        for half in range(spec.halves):
            start = half * spec.columns * size
            if pairs:
                both = read(self.kb, at, start, spec.dtype, 2, inside[0])
                some = [both.register(i) for i in range(2)]
            else: some = [read(self.kb, at, start + i * size, spec.dtype, 1, guard).register()
                          for i, guard in enumerate(inside)]
            made.append(some)
        return made

    def value(self, sums: Sequence[Value], bias: Sequence[Value], weight: Value | None) -> Value:
        """One element of the result, f32, of sums and biases of each half."""
        if bias: sums = [x + more for x, more in zip(sums, bias, strict=True)]
        made = activate(self.kb, self.spec.activation, sums[0], sums[1]) if self.spec.activation else sums[0]
        return made if weight is None else made * weight
