"""From the sums of lanes to the result: how a `gemv` kernel adds what its warps and CTAs have, and stores.

Protocol: the sums of each warp go to shared memory, in place of the activations, as [warp along K][part][row]
[column]; each thread adds those of its elements, always in the order of the warps. Where several CTAs
share K, either they are a cluster (sm_90a, at most 8), whose CTAs each finish their share of the elements
from the sums in the shared memory of all; or each writes its sums to the workspace and counts itself at
the tile's flag, and the last to come finishes them all. Both add in the order of splits: the result does
not depend on the order of CTAs.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.tile.epilogue import evaluate_element, load_element, store_element
from tinygrad_nv.tile.expression import Load
from tinygrad_nv.tile.gemm.gemv.main_loop import Sums
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gemm.splits import is_last


class Columns(Protocol):
    """A plan's description of a CTA: its columns and threads, and how sums lie in shared memory."""

    @property
    def spec(self) -> GemmSpec: ...
    @property
    def block_n(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def blocks_n(self) -> int: ...
    @property
    def warps_k(self) -> int: ...
    @property
    def splits(self) -> int: ...
    @property
    def sums_pitch(self) -> int: ...
    @property
    def smem_bytes(self) -> int: ...


class LaneSums(Protocol):
    """Sums of a warp: of type `total`, and where they belong."""
    total: str

    def corner(self) -> tuple[Value | int, Value]: ...
    def results(self) -> Sums: ...


class GemvEpilogue:
    """The epilogue of a kernel."""

    def __init__(self, kb: Kernel, plan: Columns, lanes: LaneSums, smem: Shared, rows: Value,
                 batch: list[Value],
                 batched: Callable[[tuple[int, ...], int], Value], warp_k: Value, warp_n: Value, out: Value,
                 extras: list[Value], shared: Sequence[Value]) -> None:
        self.kb, self.plan, self.spec, self.lanes, self.rows = kb, plan, plan.spec, lanes, rows
        self.batch, self.batched, self.warp_k, self.warp_n = batch, batched, warp_k, warp_n
        self.out, self.extras, self.shared = out, extras, shared
        self.base = smem.address()
        self.block_n, self.threads = plan.block_n, plan.threads
        self.elements = plan.spec.m * self.block_n
        self.part_bytes = 4 * plan.spec.m * plan.sums_pitch

    def write(self) -> None:
        """Everything after the loop over K."""
        kb = self.kb
        with kb.comment("sums of this warp, where the activations were"):
            kb.sync()
            self.spill()
            kb.sync()
        if self.plan.splits == 1: self.alone()
        elif self.kb.cluster: self.in_cluster()
        else: self.last_one()

    def spill(self) -> None:
        """Sums of lanes to shared memory."""
        kb, plan = self.kb, self.plan
        start = self.base + self.warp_k * (self.spec.parts * self.part_bytes) + self.warp_n * 4
        row, column = self.lanes.corner()
        start = start + (column * 4 + row * (4 * plan.sums_pitch) if isinstance(row, Value) else column * 4)
        for total, part, down, right, has in self.lanes.results():
            offset = part * self.part_bytes + 4 * (down * plan.sums_pitch + right)
            kb.emit("st.shared.b32", start.at(offset), total, guard=has)

    # **** elements ****

    def row_and_column(self, number: Value) -> tuple[Value, Value]:
        """Returns the row and column of an element of the tile: neighbouring threads store neighbouring
        elements."""
        if self.spec.out.major == "M": return number % self.spec.m, number // self.spec.m
        return number // self.block_n, number % self.block_n

    def warps_sums(self, number: Value) -> list[Value]:
        """An element's sums over the CTA's warps, for each part."""
        row, column = self.row_and_column(number)
        at = self.base + (row * self.plan.sums_pitch + column) * 4
        return [self.add_values([self.load_shared_word(at, (warp * self.spec.parts + part) * self.part_bytes)
                            for warp in range(self.plan.warps_k)]) for part in range(self.spec.parts)]

    def load_shared_word(self, at: Value, offset: int) -> Value:
        made = self.kb.reg(self.lanes.total)
        self.kb.emit(f"ld.shared.{self.lanes.total}", made, at.at(offset))
        return made

    def add_values(self, values: list[Value]) -> Value:
        """Their sum, from the left."""
        total = values[0]
        for value in values[1:]: total = total + value
        return total

    def each(self, write: Callable[[Value], None], stride: int, first: Value) -> None:
        """Calls `write` for this thread's elements: `first`, and every `stride` from there."""
        for start in range(0, self.elements, stride):
            number = first + start if start else first
            if start + stride <= self.elements: write(number)
            else:
                with self.kb.if_(number < self.elements): write(number)

    # **** which lanes run the epilogue ****

    def alone(self) -> None:
        with self.kb.comment("elements of this thread"):
            self.each(lambda number: self.finish(number, self.warps_sums(number)), self.threads,
                      self.kb.tid.x)

    def in_cluster(self) -> None:
        """The sums over warps go where those of warp 0 were, which no other thread reads."""
        kb, plan, s = self.kb, self.plan, self.plan.splits

        def keep(number: Value) -> None:
            row, column = self.row_and_column(number)
            at = self.base + (row * plan.sums_pitch + column) * 4
            for part, total in enumerate(self.warps_sums(number)):
                kb.emit("st.shared.b32", at.at(part * self.part_bytes), total)

        def collect(number: Value) -> None:
            row, column = self.row_and_column(number)
            at = self.base + (row * plan.sums_pitch + column) * 4
            found: list[list[Value]] = [[] for _ in range(self.spec.parts)]
            for rank in range(s):
                there = kb.mapa(at, rank)
                for part, values in enumerate(found):
                    made = kb.reg(self.lanes.total)
                    kb.emit(f"ld.shared::cluster.{self.lanes.total}", made, there.at(part * self.part_bytes))
                    values.append(made)
            self.finish(number, [self.add_values(values) for values in found])

        with kb.comment("sums of this CTA, for the cluster"):
            if plan.warps_k > 1: self.each(keep, self.threads, kb.tid.x)
            kb.cluster_arrive()
            kb.cluster_wait()
        with kb.comment("this CTA's share of the elements"):
            self.each(collect, self.threads * s, kb.ctaid.y * self.threads + kb.tid.x)
            kb.cluster_arrive()  # shared memory is there as long as others read it
            kb.cluster_wait()

    def last_one(self) -> None:
        """Through memory: [tile][split][part][element] of the workspace, one flag a tile."""
        kb, plan, s = self.kb, self.plan, self.plan.splits
        workspace, flags = self.shared
        tile = kb.ctaid.z * plan.blocks_n + kb.ctaid.x
        a_split = 4 * self.spec.parts * self.elements
        tile_at = workspace + tile.to("u64") * (s * a_split)

        def keep(number: Value) -> None:
            at = tile_at + (kb.ctaid.y * (a_split // 4) + number).to("u64") * 4
            for part, total in enumerate(self.warps_sums(number)):
                kb.emit("st.global.b32", at.at(4 * part * self.elements), total)

        def collect(number: Value) -> None:
            at, found = tile_at + number.to("u64") * 4, []
            for part in range(self.spec.parts):
                values = kb.regs(self.lanes.total, s)
                for split, value in enumerate(values):
                    kb.emit(f"ld.global.cg.{self.lanes.total}", value,
                           at.at(split * a_split + 4 * part * self.elements))
                found.append(self.add_values(values))
            self.finish(number, found)

        with kb.comment("sums of this CTA, for the last one"):
            self.each(keep, self.threads, kb.tid.x)
            arrivals = (self.base + (plan.smem_bytes - 16)).at()
            last = is_last(kb, flags, tile, arrivals, s)
        with kb.comment("the last one"), kb.if_(last):
            self.each(collect, self.threads, kb.tid.x)

    # **** the epilogue ****

    def finish(self, number: Value, sums: list[Value]) -> None:
        """One element, when it is inside."""
        kb, spec = self.kb, self.spec
        m, column = self.row_and_column(number)
        n = kb.ctaid.x * self.block_n + column
        inside = n < spec.n if spec.n % self.block_n else None
        if spec.symbolic: inside = m < self.rows if inside is None else inside & (m < self.rows)
        if inside is None: self.store(m, n, sums)
        else:
            with kb.if_(inside): self.store(m, n, sums)

    def store(self, m: Value, n: Value, sums: list[Value]) -> None:
        spec = self.spec
        done = evaluate_element(self.kb, spec.epilogue, sums, lambda load: self.load_element(load, m, n),
                        lambda axis: self.position(axis, m, n))
        at = m.to("u64") * spec.out.m + n.to("u64") * spec.out.n
        store_element(self.kb, self.out + at * spec.out.dtype.itemsize, done, spec.out.dtype)

    def load_element(self, load: Load, m: Value, n: Value) -> Value:
        """An element of a parameter of the epilogue."""
        at = self.batched(load.batch, load.offset) if load.batch else self.kb.reg("u64", load.offset)
        at = at + m.to("u64") * load.m + n.to("u64") * load.n
        return load_element(self.kb, self.extras[load.parameter], at, load.dtype)

    def position(self, axis: str | int, m: Value, n: Value) -> Value:
        """An index of the element, as s32."""
        return (m if axis == "m" else n if axis == "n" else self.batch[int(axis)]).to("s32")
