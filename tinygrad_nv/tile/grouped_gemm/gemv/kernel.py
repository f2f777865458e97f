"""Grouped matmuls of few rows a group (spec.py): each matrix that has rows is read once for a tile of them.
For sm_80 and later, any extents.

    wait for the kernel before; the kernel after may begin
    the group and the rows of this CTA, from the offsets (work.py); a CTA without any ends
    as gemm/gemv: weights past L1, activations in shared memory, gathered from the rows of x
    bias, activation, weight; each row to its place

Several CTAs share a sum in a cluster on sm_90a, else through the workspace. Rows of a tile that the group
lacks are zeros where tensor cores multiply them, and stored nowhere.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.epilogue import store_element
from tinygrad_nv.tile.gemm.gemv.epilogue import Columns, GemvEpilogue
from tinygrad_nv.tile.gemm.gemv.kernel import GemvKernel, x_width
from tinygrad_nv.tile.gemm.gemv.plan import GemvPlan
from tinygrad_nv.tile.grouped_gemm.epilogue import GroupedEpilogue
from tinygrad_nv.tile.grouped_gemm.gemv.plan import plan_of
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedGemv
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.grouped_gemm.work import Tile, most_tiles, tile_of
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.template import GPU


def grouped_gemv(spec: GroupedGemmSpec, schedule: GroupedGemv, gpu: GPU) -> GemmKernel:
    """The kernel. Parameters in this order: out; workspace and flags, where splits meet there; x; w; offsets;
    order, weights, bias, where the spec has them."""
    plan = plan_of(spec, schedule)
    cluster = (1, plan.splits, 1) if plan.is_cluster(gpu.arch) else ()
    kb = Kernel("grouped_gemv", arch=gpu.arch, threads=schedule.threads, cluster=cluster,
                min_ctas=plan.ctas_an_sm)
    _GroupedGemvKernel(kb, plan, spec).write()
    numbers = most_tiles(spec, schedule.rows)
    shared = plan.splits > 1 and not cluster
    tiles = plan.blocks_n * numbers
    nbytes = 4 * tiles * plan.splits * spec.halves * schedule.rows * schedule.block_n if shared else 0
    return GemmKernel(kb.name, kb.ptx(), (plan.blocks_n, plan.splits, numbers), schedule.threads,
                      kb.dynamic_smem, cluster=cluster or (1, 1, 1), workspace_bytes=nbytes,
                      flags=tiles if shared else 0, pdl=kb.hopper)


class _GroupedGemvKernel(GemvKernel):
    """A matmul's kernel whose CTAs have a tile of a group each."""

    def __init__(self, kb: Kernel, plan: GemvPlan, grouped: GroupedGemmSpec) -> None:
        self.grouped = grouped
        super().__init__(kb, plan, swapped=False)

    def declare_params(self, swapped: bool) -> tuple[Value, Value, Value]:
        """x, the group's matrix, and how many rows the tile has."""
        kb, spec = self.kb, self.grouped
        self.finish, self.extras = GroupedEpilogue(kb, spec), []
        if kb.hopper:
            kb.wait_for_previous_grid()
            kb.launch_dependents()
        self.tile = tile_of(kb, spec, self.finish.offsets, kb.ctaid.z, self.plan.spec.m)
        matrix = advance(kb, self.finish.matrices["w"], self.tile.group,
                          spec.n * spec.k * spec.dtype.itemsize)
        return self.finish.x, matrix, self.tile.rows

    def indices(self) -> list[Value]: return []

    def wait(self, some: Value) -> None:
        """All have waited."""

    def stage(self, first_k: Value) -> None:
        plan = self.plan
        gather_rows(self.kb, plan, self.finish, self.tile, first_k, plan.span, plan.pitch_bytes,
                 self.smem.address(), self.read)

    def epilogue(self) -> GemvEpilogue:
        return GroupEpilogue(self.finish, self.tile, self.kb, self.plan, self.lanes, self.smem, self.rows,
                             self.batch, self.batch_offset, self.warp_k, self.warp_n, self.out, [],
                            self.shared)


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
