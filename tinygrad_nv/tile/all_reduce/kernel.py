"""All-reduce through the memory of peers (workspace.py has the protocol). For sm_80 and later.

    wait for the kernel before; the addresses of all workspaces; the channel's epochs
    each round:
        x → own half
        phase 0: all peers' halves are there
        one-shot:   each vector: one of every peer, all under way together; added in the order of ranks
        two-shot:   the same for this GPU's shard → own half; phase 1; each vector from the GPU that summed it
        multimem:   this GPU's shard of all halves, as the switch adds it up → all halves; phase 1; own half
        the sums → out, or residual and norm of each row
    the epochs

An epilogue stores a round's sums, or adds a residual and normalizes rows (spec.py): `write(first, count,
threads, sums)` goes through a round's vectors, which lie from vector `first` of the message on; `sums(i)`
emits what makes vector `i` of the round, in a thread that needs it.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.all_reduce.schedules import AllReduceSchedule, Multimem, OneShot, TwoShot
from tinygrad_nv.tile.all_reduce.spec import VECTOR_BYTES, AllReduceSpec
from tinygrad_nv.tile.all_reduce.vectors import (
    WORDS,
    Words,
    add_vectors,
    copy_elements,
    elements,
    load,
    load_reduce,
    store,
    store_elements,
    vector,
)
from tinygrad_nv.tile.all_reduce.workspace import EPOCH, LINE_BYTES, PHASE_BYTES
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.lanes import across
from tinygrad_nv.tile.template import GPU

Sums = Callable[[Value], Words]


def one_shot(spec: AllReduceSpec, s: OneShot, gpu: GPU) -> TileKernel:
    """The kernel. Parameters in this order: out; of rows with a norm residual_out; x; of rows with a norm
    residual and weight; peers, the addresses of all workspaces in order of ranks; u32 rank."""
    return _finish_kernel(_OneShot(spec, s, gpu))


def two_shot(spec: AllReduceSpec, s: TwoShot, gpu: GPU) -> TileKernel:
    """The kernel, with the parameters of `one_shot`."""
    return _finish_kernel(_TwoShot(spec, s, gpu))


def multimem(spec: AllReduceSpec, s: Multimem, gpu: GPU) -> TileKernel:
    """The kernel, with the parameters of `one_shot`; before the rank, the address of the multicast object."""
    return _finish_kernel(_Multimem(spec, s, gpu))


def _finish_kernel(made: AllReduceKernel) -> TileKernel:
    made.write()
    kb = made.kb
    return TileKernel(kb.name, kb.ptx(), (made.s.ctas, 1, 1), made.s.threads, pdl=kb.hopper)


class AllReduceKernel:
    """A kernel under construction."""

    def __init__(self, spec: AllReduceSpec, s: AllReduceSchedule, gpu: GPU) -> None:
        self.kb = kb = Kernel(s.template, arch=gpu.arch, threads=s.threads, min_ctas=1)
        self.spec, self.s = spec, s
        out = kb.pointer("out")
        residual_out = kb.pointer("residual_out") if spec.columns else out
        self.x = kb.pointer("x")
        self.epilogue: Epilogue = Plain(kb, spec, out)
        if spec.columns:
            residual, weight = kb.pointer("residual"), kb.pointer("weight")
            self.epilogue = ResidualNorm(kb, spec, s, out, residual_out, residual, weight)
        self.table = kb.pointer("peers")
        if type(s) is Multimem: self.multicast = kb.pointer("multicast")
        self.rank = kb.param("rank", "u32")
        self.round_vectors = s.vectors_of_round(spec)

    def write(self) -> None:
        """The kernel."""
        kb, s = self.kb, self.s
        with kb.comment("the channel, in the workspaces of all GPUs"):
            lines, halves = kb.ctaid.x * LINE_BYTES, kb.ctaid.x * (2 * s.half_bytes)
            self.peers = kb.regs("u64", self.spec.world)
            for i in range(0, self.spec.world - 1, 2):
                kb.emit("ld.global.v2.u64", self.peers[i:i + 2], self.table.at(8 * i))
            if self.spec.world % 2:
                kb.emit("ld.global.u64", self.peers[-1], self.table.at(8 * (self.spec.world - 1)))
            self.own = kb.reg("u64")
            kb.emit("ld.global.u64", self.own, advance(kb, self.table, self.rank, 8).at())
            self.line = self.own + lines.to("u64")
            self.lines, first = lines, s.workspace.data
            self.at = [peer + (halves + first).to("u64") for peer in self.peers]
            self.mine = self.own + (halves + first).to("u64")
            if type(s) is Multimem: self.every = self.multicast + (halves + first).to("u64")
        with kb.comment("the thread's peer, whose arrivals it tells and waits for"):
            self.tells = kb.tid.x < self.spec.world
            peer = kb.reg("u64", 0)
            kb.emit("ld.global.u64", peer, advance(kb, self.table, kb.tid.x, 8).at(), guard=self.tells)
            self.peer_flags = advance(kb, peer + lines.to("u64"), self.rank, 4)
            self.heard = advance(kb, self.line, kb.tid.x, 4)
        if kb.hopper:
            kb.wait_for_previous_grid()
            kb.launch_dependents()
        self.epochs = kb.regs("u32", s.phases)
        for phase, epoch in enumerate(self.epochs):
            kb.emit("ld.global.u32", epoch, self.line.at(EPOCH + 4 * phase))
        with kb.loop(0, self.s.rounds(self.spec), kind="u32") as number: self.round(number)
        with kb.if_(kb.tid.x == 0):
            for phase, epoch in enumerate(self.epochs):
                kb.emit("st.global.u32", self.line.at(EPOCH + 4 * phase), epoch)

    def round(self, number: Value) -> None:
        """One round of this CTA."""
        kb, spec, s = self.kb, self.spec, self.s
        for epoch in self.epochs: kb.emit("add.u32", epoch, epoch, 1)
        self.side = half = ((self.epochs[0] & 1) * s.half_bytes).to("u64")
        self.first = (number * s.ctas + kb.ctaid.x) * self.round_vectors
        self.count = kb.reg("u32")
        kb.emit("min.u32", self.count, self.first, spec.vectors)
        self.count = spec.vectors - self.count
        kb.emit("min.u32", self.count, self.count, self.round_vectors)
        self.halves, self.half = [each + half for each in self.at], self.mine + half
        with kb.comment("x into the half"): self.each_vector(self.stage_vector)
        self.exchange(0)
        self.sums()

    def each_vector(self, done: Callable[[Value], None]) -> None:
        """Something with each of the round's vectors that this thread has."""
        kb = self.kb
        with kb.loop(kb.tid.x, self.count, self.s.threads, kind="u32") as i: done(i)

    def stage_vector(self, i: Value) -> None:
        """A vector of x into the half; what the last one has too little is zero."""
        kb, spec = self.kb, self.spec
        source = advance(kb, self.x, self.first + i, VECTOR_BYTES)
        target = advance(kb, self.half, i, VECTOR_BYTES)
        if not (rest := spec.count % spec.of_vector):
            store(kb, target.at(), load(kb, source.at()))
            return
        whole = self.first + i < spec.vectors - 1
        with kb.if_(whole): store(kb, target.at(), load(kb, source.at()))
        with kb.else_():
            store(kb, target.at(), kb.regs("b32", 4, 0))
            copy_elements(kb, target, source, rest, spec.dtype)

    def exchange(self, phase: int) -> None:
        """All peers' CTAs of this channel have come here, and what they wrote is visible."""
        kb, epoch = self.kb, self.epochs[phase]
        with kb.comment(f"phase {phase}"):
            kb.sync()
            with kb.if_(self.tells):
                kb.emit("st.release.sys.global.u32", self.peer_flags.at(phase * PHASE_BYTES), epoch)
                seen = kb.reg("u32")

                def late() -> Value:
                    kb.emit("ld.acquire.sys.global.u32", seen, self.heard.at(phase * PHASE_BYTES))
                    behind = kb.reg("s32")
                    kb.emit("sub.s32", behind, seen, epoch)
                    return behind < 0
                with kb.while_(late): pass
            kb.sync()

    def sum_vector(self, i: Value) -> Words:
        """Vector `i` of the round, of all peers, added up in order of ranks."""
        kb, dtype = self.kb, self.spec.dtype
        read = [load(kb, advance(kb, half, i, VECTOR_BYTES).at()) for half in self.halves]
        sums = elements(kb, read[0], dtype)
        for each in read[1:]: sums = add_vectors(sums, elements(kb, each, dtype))
        return vector(kb, sums, dtype)

    def sums(self) -> None:
        """From x in all halves to the results."""
        raise NotImplementedError


class _OneShot(AllReduceKernel):
    """Every GPU adds up everything."""

    def sums(self) -> None: self.epilogue.write(self.first, self.count, self.s.threads, self.sum_vector)


class _TwoShot(AllReduceKernel):
    """Every GPU adds up a shard of each round."""
    s: TwoShot

    def sums(self) -> None:
        kb, spec = self.kb, self.spec
        shard, behind = self.s.shard(spec, self.round_vectors), self.round_vectors * VECTOR_BYTES
        with kb.comment("this GPU's shard"):
            first, end = self.rank * shard, kb.reg("u32")
            kb.emit("min.u32", end, first + shard, self.count)
            with kb.loop(first + kb.tid.x, end, self.s.threads, kind="u32") as i:
                target = advance(kb, self.half, i - first, VECTOR_BYTES)
                store(kb, target.at(behind), self.sum_vector(i))
        self.exchange(1)
        if isinstance(self.epilogue, Plain):
            self.gather(self.epilogue, shard, behind)
            return

        def gather_vector(i: Value) -> Words:
            owner = i // shard
            half = self.halves[0]
            for number in range(1, spec.world): half = kb.select(owner == number, self.halves[number], half)
            return load(kb, advance(kb, half, i - owner * shard, VECTOR_BYTES).at(behind))
        self.epilogue.write(self.first, self.count, self.s.threads, gather_vector)

    def gather(self, epilogue: Plain, shard: int, behind: int) -> None:
        """A vector of every GPU's shard, all under way together."""
        kb = self.kb
        with kb.comment("all shards"), kb.loop(kb.tid.x, shard, self.s.threads, kind="u32") as i:
            places = [i + number * shard for number in range(self.spec.world)]
            there = [at < self.count for at in places]
            read = [load(kb, advance(kb, half, i, VECTOR_BYTES).at(behind), guard)
                    for half, guard in zip(self.halves, there, strict=True)]
            for at, guard, words in zip(places, there, read, strict=True):
                with kb.if_(guard): epilogue.put(self.first + at, words)


class _Multimem(AllReduceKernel):
    """The switch adds up, for every GPU its shard of each round. What is written at one address of memory and
    read at another passes a fence of the alias proxy."""
    s: Multimem

    def sums(self) -> None:
        kb, spec = self.kb, self.spec
        shard, behind = self.s.shard(spec, self.round_vectors), self.round_vectors * VECTOR_BYTES
        with kb.comment("this GPU's shard"):
            kb.emit("fence.proxy.alias")
            every, first, end = self.every + self.side, self.rank * shard, kb.reg("u32")
            kb.emit("min.u32", end, first + shard, self.count)
            with kb.loop(first + kb.tid.x, end, self.s.threads, kind="u32") as i:
                at = advance(kb, every, i, VECTOR_BYTES)
                kb.emit("multimem.st.weak.global.v4.f32", at.at(behind), load_reduce(kb, at, spec.dtype))
            kb.emit("fence.proxy.alias")
        self.exchange(1)

        def gather_vector(i: Value) -> Words: return load(kb,
                                                          advance(kb, self.half, i, VECTOR_BYTES).at(behind))
        self.epilogue.write(self.first, self.count, self.s.threads, gather_vector)


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
