"""From the products' registers to p and ds, transposed: a warp has 16 keys, and all rows of a block.

Protocol: registers 4j … 4j + 3 of a fragment are cell j: registers 2h and 2h + 1 are of key g + 8h and of
rows 8j + 2q and 8j + 2q + 1 (g = lane / 4, q = lane % 4). For each block:

    weights.of(s, walk, row, values)      s becomes p = 2^(s · factor − log₂e · l), packed in p in 16 bits
    weights.mask(s, row)                  −∞ where a row does not see a key, before that
    weights.slopes(s, dp, values)         p (dp · scale − scale · delta) in 16 bits, in `ds`

A score that is a positive multiple `scale` of the sum costs nothing: factor = scale · log₂e. Another one is
evaluated by flash_score.py, with rows and columns exchanged, as is its derivative, which then stands where
scale does: s becomes p · derivative, and `slopes` multiplies it by dp − delta.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.expression import Apply, Expression, Load, Position, walk
from tinygrad_nv.tile.flash_score import LOG2E, Extents, multiple
from tinygrad_nv.tile.lanes import HALVES
from tinygrad_nv.tile.templates.flash_backward_wgmma_blocks import Blocks
from tinygrad_nv.tile.templates.flash_backward_wgmma_plan import Plan


def transposed(score: Expression) -> Expression:
    """An expression with rows and columns exchanged."""
    made: dict[Expression, Expression] = {}
    for node in walk(score):
        if isinstance(node, Load): made[node] = replace(node, m=node.n, n=node.m)
        elif isinstance(node, Position) and isinstance(node.axis, str):
            made[node] = Position("n" if node.axis == "m" else "m")
        elif isinstance(node, Apply):
            made[node] = Apply(node.op, tuple(made[arg] for arg in node.args), node.dtype)
        else: made[node] = node
    return made[score]


class Weights:
    """p and ds of a warp whose first key is `first` (u32)."""

    def __init__(self, k: Kernel, plan: Plan, blocks: Blocks, extents: Extents, extras: Sequence[Value],
                 first: Value) -> None:
        self.k, self.plan, self.blocks, self.extras, self.first = k, plan, blocks, extras, first
        self.scale = multiple(plan.spec.forward.score)
        self.turned = Extents(extents.s_kv, extents.s_q, 0)
        own = first.to("s32") + (k.special("laneid") >> 2).to("s32")
        self.ranges = [blocks.rows_of(own + 8 * h) for h in range(2)] if blocks.masked else []
        self.lane_row = ((k.special("laneid") & 3) << 1).to("s32")
        self.kind = HALVES[plan.spec.forward.q.dtype]

    def mask(self, s: Sequence[Value], row: Value) -> None:
        """−∞ where rows do not see keys, of a block that begins at `row` (s32)."""
        k, own = self.k, row + self.lane_row
        for h, (low, high) in enumerate(self.ranges):
            bounds = [None if each is None else each - own for each in (low, high)]
            for j in range(len(s) // 4):
                for e in range(2):
                    register, at = s[4 * j + 2 * h + e], 8 * j + e
                    sees = None if bounds[0] is None else bounds[0] <= at
                    if bounds[1] is not None:
                        below = bounds[1] >= at
                        sees = below if sees is None else sees & below
                    k.emit("selp.f32", register, register, -math.inf, sees)

    def of(self, s: Sequence[Value], p: Sequence[Value], values: Value) -> None:
        """Scores become weights; `values` is the shared address (u32) of the stage's row values."""
        k, factor = self.k, LOG2E * (1.0 if self.scale is None else self.scale)
        at = self._own(values)
        for c in range(len(s) // 8):
            logs = k.ld("shared", "f32", at.at(64 * c), 4)
            for i, register in enumerate(s[8 * c:8 * c + 8]):
                k.emit("fma.rn.f32", register, register, factor, logs[2 * (i >> 2) + (i & 1)])
                k.emit("ex2.approx.ftz.f32", register, register)
        self._pack(p, s)

    def slopes(self, s: Sequence[Value], dp: Sequence[Value], ds: Sequence[Value], values: Value) -> None:
        """ds of weights and dp."""
        k, scale = self.k, 1.0 if self.scale is None else self.scale
        at = self._own(values)
        for c in range(len(s) // 8):
            changes = k.ld("shared", "f32", at.at(4 * self.plan.schedule.block_m + 64 * c), 4)
            for i in range(8 * c, 8 * c + 8):
                k.emit("fma.rn.f32", dp[i], dp[i], scale, changes[2 * (i >> 2 & 1) + (i & 1)])
                dp[i].__imul__(s[i])
            self._pack(ds[4 * c:4 * c + 4], dp[8 * c:8 * c + 8])

    def _own(self, values: Value) -> Value:
        """The address of the lane's four values of rows 0 … 15."""
        return values + ((self.k.special("laneid") & 3) << 4)

    def _pack(self, packed: Sequence[Value], wide: Sequence[Value]) -> None:
        for i, each in enumerate(packed):
            self.k.emit(f"cvt.rn.{self.kind}x2.f32", each, wide[2 * i + 1], wide[2 * i])
