"""Filters by mass (spec.py), by radix selection in memory that stays in caches. For sm_80 and later.

    each CTA has a row, each of its first `LANES` threads a lane of the spec:
        wait for the kernel before; the kernel after may begin
        where the target is infinity, the threshold is 0
        of a long row, lists of what is above some floor (threshold_sift.py); if these have the mass,
            passes see them alone: the threshold is not below the floor
        for each pass, from the top bits of keys to the lowest:
            acc[d] += weight where key ≥ found + d · 2^shift, for each digit d > 0, element after element
            meet; in the first warp thread d adds up the lanes' acc[d], from first to last
            found += 2^shift · (how many d reach the target); meet
        out = x where key ≥ found, else -inf

Sums fall with the digit, so that counting the digits that reach the target finds the largest; digit 0 is not
asked, since there is no smaller one. A pass of b bits costs an element 2^b − 1 comparisons and additions, and
the reduction about as much as 60 elements: short lanes take 4 bits, long ones 2.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.sampling.spec import LANES, NUMBERS, FilterSpec
from tinygrad_nv.tile.sampling.threshold_sift import THREADS, Sift, order_bits
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU

Elements = Iterator[tuple[list[Value], list[Value]]]

SHORT = 64              # elements of a lane up to which a pass takes 4 bits
DEEP = 4                # elements that are loaded together
INFINITY = 0x7F800000
STRIDE = 4 * (LANES + 4)    # bytes from the sums of a digit to the next: 16 more, and in other banks


def threshold(spec: FilterSpec, schedule: Schedule, gpu: GPU) -> TileKernel:
    """The kernel of a filter. Parameters in this order: out; logits; weights; numbers."""
    threads = LANES if spec.length <= SHORT else THREADS
    kb = Kernel("threshold", arch=gpu.arch, threads=threads)
    _ThresholdKernel(kb, spec, threads).write()
    return TileKernel(kb.name, kb.ptx(), (spec.rows, 1, 1), threads, pdl=kb.hopper)


class _ThresholdKernel:
    """The kernel of a spec under construction."""

    def __init__(self, kb: Kernel, spec: FilterSpec, threads: int) -> None:
        self.kb, self.spec, self.threads, self.bits = kb, spec, threads, 4 if threads == LANES else 2
        self.out, self.logits = kb.pointer("out"), kb.pointer("logits")
        self.weights, self.numbers = kb.pointer("weights"), kb.pointer("numbers")
        # vectors of lanes that begin at multiples of 16 bytes, and are whole
        self.wide = DEEP if spec.size % DEEP == 0 and spec.length % DEEP == 0 else 1
        self.sums = kb.shared("sums", STRIDE * ((1 << self.bits) - 1))
        self.met = kb.shared("met", 4)
        self.sift = Sift(kb, spec) if threads > LANES else None

    def write(self) -> None:
        """The kernel."""
        kb, spec = self.kb, self.spec
        with kb.comment("this thread's lane"):
            row, first = kb.ctaid.x, kb.tid.x * spec.length
            count = kb.reg("s32")
            kb.emit("sub.s32", count, spec.size, first)
            kb.emit("min.s32", count, count, spec.length)
            rows = [advance(kb, each, row, 4 * spec.size) for each in (self.logits, self.weights)]
            sources = [advance(kb, each, first, 4) for each in rows]
        if kb.hopper:
            kb.wait_for_previous_grid()
            kb.launch_dependents()
        at = advance(kb, self.numbers, row, 4 * NUMBERS)
        target = kb.ld("global", "f32", at.at(4 * spec.number))[0]
        found = kb.reg("u32", 0, name="found")
        limited, bits = kb.reg("pred"), kb.reg("b32")
        kb.emit("mov.b32", bits, target)
        kb.emit("setp.ne.u32", limited, bits, INFINITY)
        def whole() -> Elements: return self.elements(sources, count)
        with kb.if_(limited):
            if self.sift is None: self.turns(found, target, whole)
            else: self.sift_lists(self.sift, found, target, rows, whole)
        self.store(row, found)

    def sift_lists(self, sift: Sift, found: Value, target: Value, rows: list[Value],
               whole: Callable[[], Elements]) -> None:
        """All passes over lists of what is above a floor, if these have the mass, or over all elements."""
        kb, enough = self.kb, self.kb.reg("u32", 0)
        floor, lists = sift.of(rows[0], rows[1], target)
        with kb.if_(lists): kb.emit("mov.u32", enough, self.count_reached([floor], target, sift.elements))
        with kb.if_(enough != 0): self.turns(found, target, sift.elements)
        with kb.else_(): self.turns(found, target, whole)

    def turns(self, found: Value, target: Value, elements: Callable[[], Elements]) -> None:
        """All passes."""
        kb, digits = self.kb, (1 << self.bits) - 1
        with kb.loop(0, 32 // self.bits, kind="u32") as turn:
            shift = kb.reg("u32")
            kb.emit("sub.u32", shift, 32 - self.bits, turn * self.bits)
            edges = [found + (kb.reg("u32", d + 1) << shift) for d in range(digits)]
            kb.emit("add.u32", found, found, self.count_reached(edges, target, elements) << shift)

    def count_reached(self, edges: list[Value], target: Value, elements: Callable[[], Elements]) -> Value:
        """How many of the sums of what is not below edges reach the target."""
        kb, totals = self.kb, self.kb.regs("f32", len(edges), 0.0)
        with kb.comment("sums of this thread's lane"), kb.if_(kb.tid.x < LANES):
            for keys, weights in elements():
                for key, weight in zip(keys, weights, strict=True):
                    for edge, total in zip(edges, totals, strict=True):
                        kb.emit("add.f32", total, total, weight, guard=key >= edge)
            for d, total in enumerate(totals):
                kb.emit("st.shared.f32", self.sums.address(kb.tid.x * 4).at(STRIDE * d), total)
        with kb.comment("of all lanes"):
            kb.sync()
            with kb.if_(kb.tid.x < 32): self.meet(target, len(edges))
            kb.sync()
            return kb.ld("shared", "u32", self.met.at())[0]

    def meet(self, target: Value, digits: int) -> None:
        """The first warp adds up the lanes, and writes how many sums reach the target."""
        kb, total, reached = self.kb, self.kb.reg("f32", 0.0), self.kb.reg("pred")
        mine = kb.tid.x < digits
        kb.emit("setp.ne.u32", reached, 0, 0)
        with kb.if_(mine):
            at = self.sums.address(kb.tid.x * STRIDE)
            with kb.loop(0, LANES // 16, kind="u32"):
                for i in range(4):
                    for each in kb.ld("shared", "f32", at.at(16 * i), 4):
                        kb.emit("add.f32", total, total, each)
                at += 64
            kb.emit("setp.ge.f32", reached, total, target)
        votes, many = kb.reg("b32"), kb.reg("u32")
        kb.emit("vote.sync.ballot.b32", votes, reached, -1)
        kb.emit("popc.b32", many, votes)
        kb.emit("st.shared.u32", self.met.at(), many, guard=kb.tid.x == 0)

    def elements(self, sources: list[Value], count: Value) -> Elements:
        """Keys and weights, `DEEP` at a time; what uses them is written once, in a loop."""
        kb = self.kb
        at = [kb.reg("u64", each) for each in sources]
        with kb.loop(0, count, DEEP, kind="s32") as j:
            keys = [order_bits(kb, x) for x in self.load_elements("b32", at[0], j, count)]
            yield keys, self.load_elements("f32", at[1], j, count)
            for each in at: each += 4 * DEEP

    def load_elements(self, kind: str, at: Value, j: Value, count: Value) -> list[Value]:
        """Elements j … of a lane; beyond its end those of key 0, which is below every edge."""
        kb = self.kb
        if self.wide > 1: return kb.ld("global", kind, at.at(), DEEP)
        made = kb.regs(kind, DEEP, -1 if kind == "b32" else 0.0)  # -1: the bits of key 0
        for i, x in enumerate(made):
            kb.emit(f"ld.global.{kind}", x, at.at(4 * i), guard=(j + i if i else j) < count)
        return made

    def store(self, row: Value, found: Value) -> None:
        """The result."""
        kb, size = self.kb, self.spec.size
        start = advance(kb, kb.reg("u64", 0), row, 4 * size)
        wide = DEEP if size % DEEP == 0 else 1
        step, vector = self.threads * wide, f".v{wide}" if wide > 1 else ""
        with kb.comment("what is kept"), kb.loop(kb.tid.x * wide, size, step * DEEP, kind="u32") as i:
            source, target = (advance(kb, each + start, i, 4) for each in (self.logits, self.out))
            inside = [(i + step * d if d else i) < size for d in range(DEEP)]
            values = [kb.regs("b32", wide, 0) for _ in inside]
            for d, (some, there) in enumerate(zip(values, inside, strict=True)):
                kb.emit(f"ld.global{vector}.b32", some if vector else some[0], source.at(4 * step * d),
                       guard=there)
            for d, (some, there) in enumerate(zip(values, inside, strict=True)):
                kept = [kb.select(order_bits(kb, x) >= found, x, 0xFF800000, "b32") for x in some]
                kb.emit(f"st.global{vector}.b32", target.at(4 * step * d), kept if vector else kept[0],
                       guard=there)
