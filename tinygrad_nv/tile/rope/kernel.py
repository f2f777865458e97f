"""Rotary positions, from q|k|v to heads and back (spec.py). For sm_80 and later.

    each CTA has a head of q, k or v; a thread a token's vector of its lower half, and that of its upper half:
        wait for the kernel before
        load both vectors, and of q and k the angles
        the kernel after may begin
        turn; store both

Which of the tensors a head is of is the same for a CTA, so that all threads of a warp go one way. Angles are
read again for each head, from L2.
"""
from __future__ import annotations

from itertools import chain

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance, read_vector, write_vector
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.lanes import Lanes, convert, round_floats
from tinygrad_nv.tile.rope.spec import RopeGradientSpec, RopeSpec
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU

THREADS = 256
VECTOR_BYTES = 16


def rope(spec: RopeSpec, schedule: Schedule, gpu: GPU) -> TileKernel:
    """The kernel. Parameters in this order: q, k, v, qkv, cos, sin; of a gradient qkv, q, k, v, cos, sin."""
    kb = Kernel(schedule.template, arch=gpu.arch, threads=THREADS)
    made = _Rope(kb, spec)
    made.write()
    grid = (-(-spec.batch * spec.tokens * made.vectors // THREADS), spec.heads + 2 * spec.kv_heads, 1)
    return TileKernel(kb.name, kb.ptx(), grid, THREADS, pdl=kb.hopper)


class _Rope:
    """The kernel of a spec under construction."""

    def __init__(self, kb: Kernel, spec: RopeSpec) -> None:
        self.kb, self.spec, self.gradient = kb, spec, isinstance(spec, RopeGradientSpec)
        names = ("qkv", "q", "k", "v") if self.gradient else ("q", "k", "v", "qkv")
        self.pointers = {name: kb.pointer(name) for name in (*names, "cos", "sin")}
        self.vector = VECTOR_BYTES // max(each.itemsize for each in (spec.dtype_of("q"), spec.angles.dtype))
        places = (spec.half, spec.angles.row, spec.angles.batch, spec.angles.offset)
        while any(place % self.vector for place in places): self.vector //= 2
        self.vectors = spec.half // self.vector
        self.space = "global" if kb.hopper else "global.nc"

    def write(self) -> None:
        """The kernel."""
        kb, spec = self.kb, self.spec
        size, d = spec.dtype.itemsize, spec.d
        number, head = kb.ctaid.x * THREADS + kb.tid.x, kb.ctaid.y
        there = number < spec.batch * spec.tokens * self.vectors
        row, first = number // self.vectors, number % self.vectors * self.vector
        b, t = row // spec.tokens, row % spec.tokens
        with kb.comment("where this thread's elements lie"):
            both = advance(kb, advance(kb, self.pointers["qkv"], row, spec.width * size), head, d * size)
            both = advance(kb, both, first, size)
            apart = self.head(head, b, t, first)
        source, target = (apart, both) if self.gradient else (both, apart)
        if kb.hopper: kb.wait_for_previous_grid()
        turns = head < spec.heads + spec.kv_heads
        low, high = self.halves(source, there, head < spec.heads)
        cos, sin = (self.angles(name, b, t, first, there & turns) for name in ("cos", "sin"))
        if kb.hopper: kb.launch_dependents()
        for i, made in enumerate(self.rotate_vectors(low, high, cos, sin, turns)):
            write_vector(kb, target, i * spec.half * size, made, there)

    def head(self, head: Value, b: Value, t: Value, first: Value) -> Value:
        """Returns the address at which elements of a token of a head of a sequence begin, in the tensor that
        the head is of."""
        kb, spec, at, before = self.kb, self.spec, self.kb.reg("u64"), 0
        for name, count in (("q", spec.heads), ("k", spec.kv_heads), ("v", spec.kv_heads)):
            size = spec.dtype_of(name).itemsize
            step = spec.tokens * spec.d * size
            inside = (head < before + count) if not before else (head >= before) & (head < before + count)
            with kb.if_(inside):
                own = head - before if before else head
                found = advance(kb, advance(kb, self.pointers[name], b, count * step), own, step)
                found = advance(kb, advance(kb, found, t, spec.d * size), first, size)
                kb.emit("mov.u64", at, found)
            before += count
        return at

    def halves(self, source: Value, there: Value, of_q: Value) -> list[list[Lanes]]:
        """The thread's vectors of the lower and of the upper half, 0 where there are none."""
        kb, dtype, half = self.kb, self.spec.dtype, self.spec.half

        def load_half(dtype: DType) -> list[list[Lanes]]:
            return [read_vector(kb, source, i * half * dtype.itemsize, dtype, self.vector, there, self.space)
                    for i in range(2)]
        if self.spec.dtype_of("q") == dtype or not self.gradient: return load_half(dtype)
        width = min(2, self.vector)
        made = [[Lanes(kb, dtypes.float32, [*kb.regs("f32", width)]) for _ in range(0, self.vector, width)]
                for _ in range(2)]

        def keep(found: list[list[Lanes]]) -> None:
            for to, lanes in zip(chain(*made), chain(*found), strict=True):
                for i in range(width): to.register(i).set(convert(lanes, dtype).register(i))
        with kb.if_(of_q): keep(load_half(dtypes.float32))
        with kb.else_(): keep(load_half(dtype))
        return made

    def angles(self, name: str, b: Value, t: Value, first: Value, guard: Value) -> list[Lanes]:
        """Returns the angles of the thread's elements; 0 where the guard does not hold."""
        kb, lies = self.kb, self.spec.angles
        size, at = lies.dtype.itemsize, self.pointers[name]
        if lies.offset: at = at + lies.offset * size
        for index, stride in ((b, lies.batch), (t, lies.row), (first, 1)):
            at = advance(kb, at, index, stride * size)
        return read_vector(kb, at, 0, lies.dtype, self.vector, guard, self.space)

    def rotate_vectors(self, low: list[Lanes], high: list[Lanes], cos: list[Lanes], sin: list[Lanes],
               turns: Value) -> tuple[list[Lanes], list[Lanes]]:
        """Both vectors rotated, or of v as they are."""
        kb, dtype, width = self.kb, self.spec.dtype, min(2, self.vector)
        made: tuple[list[Lanes], list[Lanes]] = ([], [])
        for a, b, c, s in zip(low, high, cos, sin, strict=True):
            lows, highs = [], []
            for i in range(width):
                x, y, z = a.register(i), b.register(i), s.register(i)
                w = kb.select(turns, c.register(i), 1.0, "f32")     # sines of v are 0
                plus, minus, opposite = kb.regs("f32", 3)
                kb.emit("mul.f32", opposite, z, -1.0)
                by_low, by_high = (opposite, z) if not self.gradient else (z, opposite)
                kb.emit("mul.f32", plus, x, w)
                kb.emit("fma.rn.f32", plus, y, by_low, plus)
                kb.emit("mul.f32", minus, y, w)
                kb.emit("fma.rn.f32", minus, x, by_high, minus)
                lows.append(plus)
                highs.append(minus)
            for results, values in zip(made, (lows, highs), strict=True):
                results.append(round_floats(kb, list(values), dtype))
        return made
