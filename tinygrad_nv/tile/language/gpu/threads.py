"""Threads: the place of each along each axis of a tile, and which lanes hold copies.

Protocol: what depends on the thread alone is made once, at the kernel's beginning, where all code behind it
finds it: `Threads.prelude` is a block of code there.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.ptx.builder.core import CodeBlock
from tinygrad_nv.tile.language.gpu.layout import Layout, extents


class Threads:
    """Numbers of a thread of `1 << bits`."""

    def __init__(self, kb: Kernel, bits: int) -> None:
        self.kb, self.bits = kb, bits
        self.block = CodeBlock()
        kb.current.lines.append(self.block)
        self._sums: dict[tuple[tuple[int, int], ...], Value | int] = {}
        self._firsts: dict[int, Value] = {}

    @contextmanager
    def prelude(self) -> Iterator[None]:
        """Puts what is emitted inside the block at the kernel's beginning."""
        saved, self.kb.current = self.kb.current, self.block
        try: yield
        finally: self.kb.current = saved

    def sum(self, pairs: Sequence[tuple[int, int]]) -> Value | int:
        """The sum, over (bit of the thread's number, weight), of the weights of bits that are set: s32."""
        key = tuple(sorted((at, weight) for at, weight in pairs if weight))
        if not key: return 0
        if key not in self._sums:
            with self.prelude(): self._sums[key] = self._sum_bits(key)
        return self._sums[key]

    def _sum_bits(self, pairs: Sequence[tuple[int, int]]) -> Value:
        kb, total, left = self.kb, None, list(pairs)
        tid = kb.tid.x
        while left:
            at, weight = left.pop(0)
            count = 1
            while left and left[0] == (at + count, weight << count):
                left.pop(0)
                count += 1
            part = tid >> at if at else tid
            if at + count < self.bits: part = part & (1 << count) - 1
            if weight > 1: part = part * weight if weight & weight - 1 else part << weight.bit_length() - 1
            total = part if total is None else total + part
        assert total is not None
        made = kb.reg("s32")
        kb.emit("mov.b32", made, total)
        return made

    def coordinate(self, layout: Layout, shape: Sequence[int], axis: int) -> Value | int:
        """A thread's place along an axis: what registers add to."""
        return self.weigh(layout, shape, {axis: 1})

    def weigh(self, layout: Layout, shape: Sequence[int], strides: dict[int, int]) -> Value | int:
        """Σ place along an axis · its stride."""
        of = extents(tuple(shape))
        pairs = [(at, stride << bit - of.first[axis]) for axis, stride in strides.items()
                 for at, bit in layout.thread_bits(of.of_axis(axis))]
        return self.sum(pairs)

    def first(self, mask: int) -> Value | None:
        """Whether these bits of the thread's number are all 0; None where there are none."""
        if not mask: return None
        if mask not in self._firsts:
            with self.prelude(): self._firsts[mask] = (self.kb.tid.x & mask) == 0
        return self._firsts[mask]

    def bit(self, at: int) -> Value:
        """Whether a bit of the thread's number is 1."""
        key = -1 - at
        if key not in self._firsts:
            with self.prelude(): self._firsts[key] = (self.kb.tid.x & 1 << at) != 0
        return self._firsts[key]
