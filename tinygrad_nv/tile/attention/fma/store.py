"""How warps of flash_fma with the same rows reduce, and how the result is stored.

Protocol: `WarpReduction` is for what all warps of a CTA do when the ring is read no more, in memory of the
ring:

    row_sums   every warp leaves its rows' maxima and sums, and takes the largest max and the sum of all
               for its own; its sums are rescaled by 2^(factor · (its max − the largest)), and its outputs too
    sums       warps but the first of those with the same rows tell their sums, which the first adds

Each lane tells what it holds to the lanes of its number, so that nothing depends on the layout of the sums.
The order of additions is that of the warps. A warp that saw nothing has weight 0.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import place
from tinygrad_nv.tile.attention.fma.matmuls import ExactSoftmax, Outputs
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.lanes import FLOAT16S, pack


@dataclass
class WarpReduction:
    """Reduction over `warps` neighbouring warps, which have the same rows, in shared memory from `start`
    (u32) on; `warp` (u32) is this warp's number in the CTA."""
    kb: Kernel
    start: Value
    warp: Value
    warps: int

    def __post_init__(self) -> None:
        self.own = self.warp % self.warps
        self.lane = self.kb.special("laneid")

    def row_sums(self, softmax: ExactSoftmax, outputs: Outputs) -> None:
        """Maxima and sums of all rows, in each warp."""
        kb, count = self.kb, len(softmax.row_max)
        lanes = 32 * 8
        base = self.start + (self.lane << 3)
        first = base + (self.warp - self.own) * (count * lanes)
        kb.sync()
        mine = base + self.warp * (count * lanes)
        for i, pair in enumerate(zip(softmax.row_max, softmax.row_sum, strict=True)):
            kb.st("shared", "f32", mine.at(i * lanes), pair)
        kb.sync()
        factors = []
        for i, (row_max, row_sum) in enumerate(zip(softmax.row_max, softmax.row_sum, strict=True)):
            pairs = [kb.ld("shared", "f32", first.at((w * count + i) * lanes), 2) for w in range(self.warps)]
            most = kb.reg("f32", pairs[0][0])
            for other, _ in pairs[1:]: kb.emit("max.f32", most, most, other)
            whole, base = kb.reg("f32", 0.0), softmax.base(most)
            for other, share in pairs:
                kb.emit("fma.rn.f32", whole, share, softmax.weight(other, base), whole)
            factors.append(softmax.weight(row_max, base))
            row_max.set(most)
            row_sum.set(whole)
        outputs.scale_rows(factors)

    def sums(self, sums: Sequence[Sequence[Sequence[Value]]]) -> None:
        """Adds the others' sums to those of the first of the warps."""
        kb, fours = self.kb, [four for row in sums for four in row]
        lanes = 32 * 16
        nbytes = len(fours) * lanes
        others = self.warps - 1
        number = self.warp // self.warps * others
        base = self.start + (self.lane << 4) + number * nbytes
        kb.sync()
        with kb.if_(self.own > 0):
            mine = base + (self.own - 1) * nbytes
            for i, four in enumerate(fours): kb.st("shared", "f32", mine.at(i * lanes), four)
        kb.sync()
        with kb.if_(self.own == 0):
            for other in range(others):
                for i, four in enumerate(fours):
                    told = kb.ld("shared", "f32", base.at(other * nbytes + i * lanes), 4)
                    for register, value in zip(four, told, strict=True): register += value


def store(kb: Kernel, spec: AttentionSpec, out: Value, outputs: Outputs, row: Value, rows: Value,
          edges: bool) -> None:
    """Stores a warp's sums: `out` (u64) is where the lane's first row begins, `row` (u32) the warp's first of
    `rows`; with `edges` it may have more."""
    size, lane = spec.out.dtype.itemsize, kb.special("laneid")
    width = next(n for n in (4, 2, 1) if n * size <= spec.out.alignment_bytes and spec.d_v % n == 0)
    column, first = (lane & 7) << 2, row + outputs.lane_row
    base = out + (column * size).to("u64")
    for i, groups in enumerate(outputs.sums):
        inside = first + 4 * i < rows if edges else None
        for j, four in enumerate(groups):
            for e in range(0, 4, width):
                guard = inside
                if spec.d_v < 32 * (j + 1):
                    seen = column + (32 * j + e) < spec.d_v
                    guard = seen if guard is None else guard & seen
                at = place(base, (4 * i * spec.out.row + 32 * j + e) * size)
                kind, values = _as(kb, spec, four[e:e + width])
                vector = f".v{len(values)}" if len(values) > 1 else ""
                kb.emit(f"st.global{vector}.{kind}", at, values if vector else values[0], guard=guard)


def _as(kb: Kernel, spec: AttentionSpec, values: list[Value]) -> tuple[str, list[Value]]:
    """Elements of a row as the result has them, and their type in PTX."""
    dtype = spec.out.dtype
    if dtype == dtypes.float32: return "f32", values
    if len(values) > 1:
        return "b32", [pack(kb, values[i:i + 2], dtype) for i in range(0, len(values), 2)]
    half = kb.reg("b16")
    kb.emit(f"cvt.rn.{FLOAT16S[dtype]}.f32", half, values[0])
    return "b16", [half]
