"""A kernel for tests of stores: the product of a column and a row (k = 1), computed without tensor cores in
the fragments they leave, then finished and stored as the templates do.

Protocol: `outer(spec, schedule, arch)` is a `GemmKernel` for gemm_case.py's `run`. Operands are 16-bit floats
or bytes, whose products are exact. Warps share the tile as in the mma template, or with `wgmma` as a
warpgroup does: 64 rows each, all its columns. With `ctas` a CTA takes one tile after the other.
"""
from __future__ import annotations

from contextlib import nullcontext

from tinygrad.dtype import DType, dtypes

from tests.support.tile.gemm_case import arguments, product, reference, run
from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance, read
from tinygrad_nv.tile.gemm.mma.plan import MmaPlan
from tinygrad_nv.tile.gemm.schedules import Mma, Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gemm.wgmma.plan import WgmmaPlan
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.result_store import Store
from tinygrad_nv.tile.store_plan import Cell, StorePlan

SMALL = Mma().block(32, 32).warps(2, 2)
WARPS = Mma().block(64, 128).warps(2, 2)
GROUPS = Wgmma().block(128, 64).warps(12)
HALF, SINGLE, BYTE = dtypes.bfloat16, dtypes.float32, dtypes.int8
OUTS = [HALF, SINGLE, dtypes.int32, BYTE, dtypes.fp8e4m3]


def planned(spec: GemmSpec, schedule: Mma | Wgmma) -> StorePlan:
    """The plan of the schedule's template."""
    if isinstance(schedule, Wgmma): return WgmmaPlan.of(spec, schedule).store
    return MmaPlan.of(spec, schedule).store


class _Outer:
    def __init__(self, spec: GemmSpec, schedule: Mma | Wgmma, arch: str, ctas: int, staged: bool) -> None:
        self.spec, self.s, self.ctas = spec, schedule, ctas
        self.plan = planned(spec, schedule)
        self.k = k = Kernel("outer", arch=arch, threads=schedule.threads)
        out, self.a, self.b = (k.pointer(name) for name in ("out", "a", "b"))
        extras = [k.pointer(f"x{i}") for i in range(len(spec.parameters))]
        self.rows = k.param("m", "u32") if spec.symbolic else k.reg("u32", spec.m)
        nbytes = self.plan.smem_bytes if staged else 0
        staging = k.shared("staging", nbytes, align=1024) if nbytes else None
        out_map = k.tensor_map("out_map") if self.plan.map else None
        self.store = Store(k, spec.store_target, self.plan, out, extras, self.rows, staging, out_map)
        self.columns = schedule.block_n // spec.parts
        self.tiles_m, self.tiles_n = -(-spec.m // schedule.block_m), -(-spec.n // self.columns)
        self.tiles = self.tiles_m * self.tiles_n * spec.matrices

    def write(self) -> GemmKernel:
        k, s = self.k, self.s
        # the last warpgroup of a wgmma schedule only loads
        some = k.if_(k.tid.x < 128 * s.consumers) if isinstance(s, Wgmma) else nullcontext()
        with some:
            if self.ctas:
                with k.loop(k.ctaid.x, k.reg("u32", self.tiles), self.ctas) as tile: self.tile(tile)
            else: self.tile(k.ctaid.x)
            self.store.finish()
        maps = (self.plan.map,) if self.plan.map else ()
        grid = (self.ctas or self.tiles, 1, 1)
        return GemmKernel("outer", k.ptx(), grid, s.threads, k.dynamic_smem, maps=maps)

    def tile(self, number: Value) -> None:
        k, s, warp = self.k, self.s, self.k.tid.x >> 5
        m, n = number % self.tiles_m * s.block_m, number // self.tiles_m % self.tiles_n * self.columns
        rest, batch = number // (self.tiles_m * self.tiles_n), []
        for extent in reversed(self.spec.batch):
            batch.append(rest % extent)
            rest = rest // extent
        batch = batch[::-1]
        columns = self.columns
        if isinstance(s, Wgmma):  # as many rounds of 64 rows a consumer as the tile has
            rows = s.block_m // s.consumers
            row, column = (warp >> 2) * rows + (warp & 3) * 16, k.reg("u32", 0)
            at = [(64 * i, 8 * j) for i in range(rows // 64) for j in range(columns // 8)]
        else:
            warp_m, warp_n = s.block_m // s.warps_m, columns // s.warps_n
            row, column = warp % s.warps_m * warp_m, warp // s.warps_m * warp_n
            at = [(16 * i, 8 * j) for i in range(warp_m // 16) for j in range(warp_n // 8)]
        first_m, first_n = m + row, n + column
        parts = range(self.spec.parts)
        cells = [Cell(r, c, [self.sums(first_m, first_n, batch, r, c, part) for part in parts])
                 for r, c in at]
        self.store.tile(first_m, first_n, batch, cells)

    def sums(self, first_m: Value, first_n: Value, batch: list[Value], r: int, c: int,
             part: int) -> list[Value]:
        """One cell's: a[row] · b[column]."""
        k, spec, lane = self.k, self.spec, self.k.special("laneid")
        a, b = [], []
        for h in range(2):
            row, column = first_m + (lane >> 2) + (r + 8 * h), first_n + ((lane & 3) << 1) + (c + h)
            for values, index, bound, operand, pointer in ((a, row, self.rows, spec.a, self.a),
                                                           (b, column, spec.n, spec.b, self.b)):
                size = operand.dtype.itemsize
                at = pointer + (operand.offset + (part * spec.part if values is b else 0)) * size
                for number, stride in zip(batch, operand.batch, strict=True):
                    at = advance(k, at, number, stride * size)
                at = advance(k, at, index, operand.mn * size)
                values.append(read(k, at, 0, operand.dtype, 1, index < bound).register())
        kind = "f32" if dtypes.is_float(spec.a.dtype) else "s32"
        made = []
        for h in range(2):
            for j in range(2):
                made.append(k.reg(kind))
                k.emit("mul.f32" if kind == "f32" else "mul.lo.s32", made[-1], a[h], b[j])
        return made


def outer(spec: GemmSpec, schedule: Mma | Wgmma, arch: str, ctas: int = 0,
          staging: bool = True) -> GemmKernel:
    """The kernel. Of a symbolic spec it has CTAs for the most rows."""
    return _Outer(spec, schedule, arch, ctas, staging).write()


def spec_of(out: DType, m: int, n: int, **more: object) -> GemmSpec:
    """A product that integers hold, with a result of a dtype."""
    return product(m, n, 1, BYTE if dtypes.is_int(out) else HALF, out=out, **more)  # type: ignore[arg-type]


def exact(spec: GemmSpec, schedule: Mma | Wgmma, arch: str, seed: int = 0, ctas: int = 0) -> None:
    """Asserts the result, bit for bit."""
    values = arguments(spec, spec.m + seed)
    assert (run(outer(spec, schedule, arch, ctas), spec, values, arch, seed) == reference(spec, values)).all()
