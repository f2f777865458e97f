"""Matrix products with mma.sync: a ring of cp.async stages, ldmatrix, m16n8k16. For sm_80 and later, and
for any extents, strides and alignment.

    for each tile along K:
        wait until its copies are in; everybody is done with the tile before
        start the copies of the tile `depth - 1` further on, into the place of the tile before
        for each 16 of K: fragments of A and B from shared memory, all products of the warp's tile
    scale, bias, activation, residual; round; store what lies inside
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.epilogue import finished, loaded, stored
from tinygrad_nv.tile.expression import Load
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.legality import require
from tinygrad_nv.tile.ops import NAMES, Fragments, TileCopy, shared_ring
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.spec import GemmSpec

DEFAULT = Schedule()


def gemm_mma(spec: GemmSpec, schedule: Schedule = DEFAULT, arch: str = "sm_80") -> GemmKernel:
    """The kernel of a product of 16-bit floats. Raises `ScheduleError` for an impossible schedule."""
    require(schedule, spec, arch)
    k = Kernel("gemm_mma", arch=arch, threads=schedule.threads)
    _Writer(k, spec, schedule).write()
    grid = (-(-spec.m // schedule.block_m), -(-spec.n // schedule.block_n), spec.matrices)
    return GemmKernel("gemm_mma", k.ptx(), grid, schedule.threads, k.dynamic_smem,
                      rows_of_cta=schedule.block_m if spec.symbolic else 0)


class _Writer:
    """The kernel as it is written: the parameters, then the stages of the protocol above."""

    def __init__(self, k: Kernel, spec: GemmSpec, schedule: Schedule) -> None:
        self.k, self.spec, self.schedule = k, spec, schedule
        self.warp_m, self.warp_n = schedule.block_m // schedule.warps_m, schedule.block_n // schedule.warps_n
        self.kind = NAMES[spec.a.dtype]
        out, a, b = (k.pointer(name) for name in ("out", "a", "b"))
        self.extras = [k.pointer(f"x{i}") for i in range(len(spec.parameters))]
        self.rows = k.param("m", "u32") if spec.symbolic else k.reg("u32", spec.m)
        self.batch = self.indices()
        self.out, self.a, self.b = (
            pointer + self.batched(place.batch, place.offset) * place.dtype.itemsize
            for pointer, place in ((out, spec.out), (a, spec.a), (b, spec.b)))

    def indices(self) -> list[Value]:
        """This CTA's index along each dimension of the batch."""
        made, rest = [], self.k.ctaid.z
        for extent in reversed(self.spec.batch):
            made.append(rest % extent)
            rest = rest // extent
        return made[::-1]

    def batched(self, strides: tuple[int, ...], offset: int) -> Value:
        """Elements before this CTA's matrix: u64."""
        at = self.k.reg("u64", offset)
        for index, stride in zip(self.batch, strides, strict=True):
            if stride: at = at + index.to("u64") * stride
        return at

    def write(self) -> None:
        """The whole kernel."""
        k, spec, s = self.k, self.spec, self.schedule
        first_m, first_n = k.ctaid.x * s.block_m, k.ctaid.y * s.block_n
        copies = (TileCopy(k, spec.a, self.a, first_m, self.rows.to("s32"), spec.k, s.block_m, s.block_k),
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
        k, lane = self.k, self.k.special("laneid")
        column = first_n + lane % 4 * 2
        for i, row in enumerate(sums):
            for half in range(2):
                m = first_m + lane // 4 + (16 * i + 8 * half)
                with k.comment(f"rows {16 * i + 8 * half} and on of the warp's tile"), k.if_(m < self.rows):
                    for j, cell in enumerate(row):
                        for one in range(2): self.store_one(m, column + (8 * j + one), cell[2 * half + one])

    def store_one(self, m: Value, n: Value, value: Value) -> None:
        """One element, when it is inside."""
        k, spec = self.k, self.spec
        with k.if_(n < spec.n):
            done = finished(k, spec.epilogue, [value], lambda load: self.loaded(load, m, n),
                            lambda axis: self.position(axis, m, n))
            at = m.to("u64") * spec.out.m + n.to("u64") * spec.out.n
            stored(k, self.out + at * spec.out.dtype.itemsize, done, spec.out.dtype)

    def loaded(self, load: Load, m: Value, n: Value) -> Value:
        """An element of a parameter of the epilogue."""
        at = self.batched(load.batch, load.offset) + m.to("u64") * load.m + n.to("u64") * load.n
        return loaded(self.k, self.extras[load.parameter], at, load.dtype)

    def position(self, axis: str | int, m: Value, n: Value) -> Value:
        """An index of the element, as s32."""
        return (m if axis == "m" else n if axis == "n" else self.batch[int(axis)]).to("s32")
