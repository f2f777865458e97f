"""Matrix products with mma.sync: a ring of cp.async stages, ldmatrix, m16n8k16. For sm_80 and later, and
for any extents, strides and alignment.

    for each tile along K:
        wait until its copies are in; everybody is done with the tile before
        start the copies of the tile `depth - 1` further on, into the place of the tile before
        for each 16 of K: fragments of A and B from shared memory, all products of the warp's tile
    scale, bias, activation, residual; round; store what lies inside
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.ops import NAMES, Fragments, TileCopy, finished, shared_ring
from tinygrad_nv.tile.schedule import Schedule, require
from tinygrad_nv.tile.spec import GemmSpec

DEFAULT = Schedule()


@dataclass(frozen=True)
class GemmKernel:
    """A kernel and how it is launched. Parameters: out, a, b, then bias and residual where the epilogue has
    them, all pointers to device memory aligned to 16 bytes."""
    name: str
    ptx: str
    grid: tuple[int, int, int]
    threads: int
    dynamic_smem: int


def gemm_mma(spec: GemmSpec, schedule: Schedule = DEFAULT, arch: str = "sm_80") -> GemmKernel:
    """The kernel of a product of 16-bit floats. Raises `ScheduleError` for an impossible schedule."""
    require(schedule, spec, arch)
    k = Kernel("gemm_mma", arch=arch, threads=schedule.threads)
    _Writer(k, spec, schedule).write()
    grid = (-(-spec.m // schedule.block_m), -(-spec.n // schedule.block_n), spec.batch)
    return GemmKernel("gemm_mma", k.ptx(), grid, schedule.threads, k.dynamic_smem)


class _Writer:
    """The kernel as it is written: the parameters, then the stages of the protocol above."""

    def __init__(self, k: Kernel, spec: GemmSpec, schedule: Schedule) -> None:
        self.k, self.spec, self.schedule = k, spec, schedule
        self.warp_m, self.warp_n = schedule.block_m // schedule.warps_m, schedule.block_n // schedule.warps_n
        self.kind = NAMES[spec.a.dtype]
        self.out, self.a, self.b = (self.batched(k.pointer(name), stride, size) for name, stride, size in (
            ("out", spec.batch_stride, spec.out.itemsize), ("a", spec.a.batch, spec.a.dtype.itemsize),
            ("b", spec.b.batch, spec.b.dtype.itemsize)))
        self.bias = k.pointer("bias") if spec.epilogue.bias else None
        self.residual = (self.batched(k.pointer("residual"), spec.batch_stride, spec.out.itemsize)
                         if spec.epilogue.residual else None)

    def batched(self, pointer: Value, stride: int, size: int) -> Value:
        """The pointer to this CTA's matrix of the batch."""
        if self.spec.batch == 1 or stride == 0: return pointer
        return pointer + self.k.ctaid.z.to("u64") * (stride * size)

    def write(self) -> None:
        """The whole kernel."""
        k, spec, s = self.k, self.spec, self.schedule
        first_m, first_n = k.ctaid.x * s.block_m, k.ctaid.y * s.block_n
        copies = (TileCopy(k, spec.a, self.a, first_m, spec.m, spec.k, s.block_m, s.block_k),
                  TileCopy(k, spec.b, self.b, first_n, spec.n, spec.k, s.block_n, s.block_k))
        rings = [shared_ring(k, f"{name}_ring", copy.tile, s.depth) for name,
                 copy in zip("ab", copies, strict=True)]
        warp = k.tid.x >> 5
        row, column = warp % s.warps_m * self.warp_m, warp // s.warps_m * self.warp_n
        fragments = (Fragments(k, copies[0].tile, copies[0].mn_major, False, row, s.block_k),
                     Fragments(k, copies[1].tile, copies[1].mn_major, True, column, s.block_k))
        sums = [[k.regs("f32", 4, 0.0) for _ in range(self.warp_n // 8)] for _ in range(self.warp_m // 16)]
        starts = [ring.address() for ring in rings]
        with k.comment(f"the first {s.depth - 1} tiles"):
            for stage in range(s.depth - 1):
                for copy, start in zip(copies, starts,
                                       strict=True): copy.next(start + stage * copy.tile.nbytes)
                k.cp_async_commit()
        reading, writing = k.reg("u32", 0), k.reg("u32", s.depth - 1)
        with k.loop(0, -(-spec.k // s.block_k)):
            with k.comment("this tile is in; everybody is done with the one before"):
                k.cp_async_wait(s.depth - 2)
                k.sync()
            with k.comment("the tile that takes its place"):
                for copy, start in zip(copies, starts,
                                       strict=True): copy.next(start + writing * copy.tile.nbytes)
                k.cp_async_commit()
            with k.comment("products"):
                for each, copy, start in zip(fragments, copies, starts, strict=True):
                    each.at_stage(start + reading * copy.tile.nbytes)
                for step in range(s.block_k // 16): self.products(fragments, sums, step)
            self.advance(reading)
            self.advance(writing)
        k.cp_async_wait(0)
        self.store(first_m + row, first_n + column, sums)

    def advance(self, stage: Value) -> None:
        """The next stage of the ring."""
        stage += 1
        stage.set(self.k.select(stage == self.schedule.depth, 0, stage, "u32"))

    def products(self, fragments: tuple[Fragments, Fragments], sums: list[list[list[Value]]],
                 step: int) -> None:
        """All products of the warp's tile for 16 of K."""
        a = [fragments[0].load(16 * i, step) for i in range(self.warp_m // 16)]
        b = [fragments[1].load(16 * j, step) for j in range(self.warp_n // 16)]
        for i, row in enumerate(sums):
            for j, cell in enumerate(row):
                half = 2 * (j % 2)
                self.k.mma("m16n8k16", f"f32.{self.kind}.{self.kind}.f32", cell, a[i],
                           b[j // 2][half:half + 2], cell)

    def store(self, first_m: Value, first_n: Value, sums: list[list[list[Value]]]) -> None:
        """Registers 2h, 2h + 1 of a product are columns 2q, 2q + 1 of row g + 8h, g = lane / 4, q = lane %
        4."""
        k, spec, lane = self.k, self.spec, self.k.special("laneid")
        column = first_n + lane % 4 * 2
        for i, row in enumerate(sums):
            for half in range(2):
                m = first_m + lane // 4 + (16 * i + 8 * half)
                with k.comment(f"rows {16 * i + 8 * half} and on of the warp's tile"), k.if_(m < spec.m):
                    start = m.to("u64") * spec.rows + column.to("u64")
                    row_bias = self.loaded(self.bias, m.to("u64")) if spec.epilogue.bias == "row" else None
                    for j, cell in enumerate(row):
                        self.store_pair(start + 8 * j, column + 8 * j, cell[2 * half:2 * half + 2], row_bias)

    def store_pair(self, at: Value, column: Value, pair: list[Value], row_bias: Value | None) -> None:
        """Two neighbours of a row, each when it is inside."""
        k, spec = self.k, self.spec
        for offset, value in enumerate(pair):
            with k.if_(column + offset < spec.n):
                bias = row_bias
                if spec.epilogue.bias == "column": bias = self.loaded(self.bias, (column + offset).to("u64"))
                residual = self.loaded(self.residual, at + offset) if self.residual is not None else None
                done = finished(k, value, spec.epilogue, bias, residual)
                self.store_one(self.out + (at + offset) * spec.out.itemsize, done)

    def loaded(self, pointer: Value | None, index: Value) -> Value:
        """An element of the result's dtype as float32."""
        assert pointer is not None
        k, dtype = self.k, self.spec.out
        place = (pointer + index * dtype.itemsize).at()
        if dtype == dtypes.float32: return k.ld("global", "f32", place)[0]
        (half,), wide = k.ld("global", "b16", place), k.reg("f32")
        k.emit(f"cvt.f32.{NAMES[dtype]}", wide, half)
        return wide

    def store_one(self, address: Value, value: Value) -> None:
        """One element, rounded to the result's dtype."""
        k, dtype = self.k, self.spec.out
        if dtype == dtypes.float32: return k.st("global", "f32", address.at(), value)
        half = k.reg("b16")
        k.emit(f"cvt.rn.{NAMES[dtype]}.f32", half, value)
        return k.st("global", "b16", address.at(), half)
