"""What consumers do with the sums of a tile: finish each element and store those inside.

Protocol: register `i` of a wgmma's sums is row 16 warp + lane / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (lane
% 4) + i % 2 of its 64 rows.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.epilogue import finished, loaded, stored
from tinygrad_nv.tile.expression import Load
from tinygrad_nv.tile.templates.wgmma_multiply import Sums
from tinygrad_nv.tile.templates.wgmma_plan import WARPGROUP, Plan
from tinygrad_nv.tile.templates.wgmma_walk import Corner


class Finish:
    """The end of a tile."""

    def __init__(self, k: Kernel, plan: Plan, out: Value, extras: list[Value], rows: Value | int) -> None:
        self.k, self.plan, self.out, self.extras, self.rows = k, plan, out, extras, rows

    def store(self, corner: Corner, sums: Sums) -> None:
        """Direct stores, element by element."""
        k, plan, spec = self.k, self.plan, self.plan.spec
        self.corner = corner
        lane, warp = k.special("laneid"), (k.tid.x >> 5) & 3
        m = corner.m + warp * 16 + lane // 4
        if plan.readers > 1: m = m + k.tid.x // WARPGROUP * plan.rows
        n = corner.n + lane % 4 * 2
        half = plan.schedule.block_n // 2 // spec.parts
        for i, row in enumerate(sums):
            for high in range(2):
                at = m + (64 * i + 8 * high)
                with k.if_(at < k.reg("u32", self.rows)):
                    for r in range(half):
                        if r // 2 % 2 != high: continue
                        self.one(at, n + (r // 4 * 8 + r % 2), [row[r + half * p] for p in range(spec.parts)])

    def one(self, m: Value, n: Value, values: list[Value]) -> None:
        """One element, when it is inside."""
        k, spec = self.k, self.plan.spec
        with k.if_(n < spec.n):
            done = finished(k, spec.epilogue, values, lambda load: self.loaded(load, m, n),
                            lambda axis: self.position(axis, m, n))
            at = self.before(spec.out.batch, spec.out.offset) + m.to("u64") * spec.out.m \
                + n.to("u64") * spec.out.n
            stored(k, self.out + at * spec.out.dtype.itemsize, done, spec.out.dtype)

    def before(self, strides: tuple[int, ...], offset: int) -> Value:
        at = self.k.reg("u64", offset)
        for index, stride in zip(self.corner.batch, strides, strict=True):
            if stride: at = at + index.to("u64") * stride
        return at

    def loaded(self, load: Load, m: Value, n: Value) -> Value:
        """An element of a parameter of the epilogue."""
        at = self.before(load.batch, load.offset) + m.to("u64") * load.m + n.to("u64") * load.n
        return loaded(self.k, self.extras[load.parameter], at, load.dtype)

    def position(self, axis: str | int, m: Value, n: Value) -> Value:
        """An index of the element, as s32."""
        return (m if axis == "m" else n if axis == "n" else self.corner.batch[int(axis)]).to("s32")
