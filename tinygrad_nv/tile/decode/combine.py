"""How a decode kernel adds up what its warps have, and a request's splits.

Protocol: parts of one row are sums of weights times values, relative to a max, and a sum of weights.
Merged:

    row_max = max of the maxima
    w       = 2^(its row_max − row_max), of each part
    out     = Σ w · sums / Σ w · row_sum         in the order of the parts; 0 where the row_sum is 0

A row's sink is added to the sum at the very end, as a part without values (`inverse_sum`).

Parts are first the warps of a CTA, in shared memory, then the splits of a request, in the workspace. A
request of one split is finished by its CTA at once; others by the kernel `combine`, a CTA for each row, whose
warps take turns at the splits: their sums are added in the order of the warps. A lane of each warp has one
split's weight. What is added in which order depends on the number of the request's own splits alone.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.decode.plan import MOST_SPLITS, DecodePlan, Parameters, SplitPlan
from tinygrad_nv.tile.decode.rows import LARGEST, LOG2E, base_of, power
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.lanes import FLOAT16S

COMBINE_WARPS = 4


def largest(kb: Kernel, values: Sequence[Value]) -> Value:
    """The largest of some."""
    made = kb.reg("f32", values[0])
    for value in values[1:]: kb.emit("max.f32", made, made, value)
    return made


def inverse(kb: Kernel, row_sum: Value) -> Value:
    """1 / row_sum, 0 for 0."""
    made = kb.reg("f32")
    kb.emit("rcp.approx.ftz.f32", made, row_sum)
    return kb.select(row_sum == 0.0, 0.0, made)


def inverse_sum(kb: Kernel, spec: DecodeSpec, sinks: Value | None, head: Value, row: Value, row_max: Value,
                row_sum: Value) -> Value:
    """Returns the factor of sums of values relative to `row_max`: 1 / the sum of the weights, to which the
    row's sink is added."""
    if sinks is None: return inverse(kb, row_sum)
    at = sinks + (head * spec.group + row % spec.group).to("u64") * 4
    sink = kb.reg("f32")
    kb.emit("min.f32", sink, kb.ld("global", "f32", at.at())[0] * LOG2E, LARGEST)
    base = base_of(kb, largest(kb, [row_max, sink]))
    weight = power(kb, row_max - base)
    return weight * inverse(kb, row_sum * weight + power(kb, sink - base))


def out_place(kb: Kernel, spec: DecodeSpec, out: Value, indices: Sequence[Value], row: Value,
              column: Value) -> Value:
    """Returns the address at which a row of the result has element `column` (u32). `indices` are request and
    key head."""
    o = spec.out
    at = kb.reg("u64", o.offset)
    for index, stride in zip((*indices, row % spec.group, row // spec.group), (*o.batch, o.row), strict=True):
        at = at + index.to("u64") * stride
    return out + (at + column.to("u64")) * 2


def store_out(kb: Kernel, spec: DecodeSpec, out: Value, indices: Sequence[Value], row: Value, column: Value,
              values: Sequence[Value]) -> None:
    """Four elements of a row of the result, from `column` on."""
    o = spec.out
    address, pairs = out_place(kb, spec, out, indices, row, column), []
    for i in (0, 2):
        pairs.append(kb.reg("b32"))
        kb.emit(f"cvt.rn.{FLOAT16S[o.dtype]}x2.f32", pairs[-1], values[i + 1], values[i])
    if o.alignment_bytes >= 8: kb.st("global", "b32", address.at(), pairs)
    else:
        for i, pair in enumerate(pairs): kb.st("global", "b32", address.at(4 * i), pair)


@dataclass
class Workspace:
    """Sums of a row's split, and its row_max and row_sum beside each other, as plan.py has them. `row` is
    the row's number among all."""
    kb: Kernel
    plan: SplitPlan
    pointer: Value

    def number(self, indices: Sequence[Value], row: Value) -> Value:
        """A row's number among all: u64."""
        request, head = indices
        heads = request.to("u64") * self.plan.spec.heads + head.to("u64")
        return heads * self.plan.spec.rows + row.to("u64")

    def sums(self, number: Value, split: Value) -> Value:
        """Returns the address at which a split's sums lie."""
        return self.pointer + (number * self.plan.most_splits + split.to("u64")) * (4 * self.plan.spec.d_v)

    def stats(self, number: Value, split: Value) -> Value:
        """Returns the address at which its row_max and row_sum lie."""
        at = (number * self.plan.most_splits + split.to("u64")) * 8
        return self.pointer + (at + self.plan.stats_start)


@dataclass
class Merge:
    """The warps of a CTA, in shared memory at `base` (u32)."""
    kb: Kernel
    plan: DecodePlan
    base: Value

    @property
    def stats_start(self) -> int:
        return 4 * self.plan.schedule.warps_n * self.plan.block_rows * self.plan.pitch

    def leave(self, row: Value, group: Value, sums: list[list[Value]], row_max: list[Value],
              row_sum: list[Value]) -> None:
        """A warp's sums: by 8 columns, two of each of a lane's rows; `row` (u32) is the lane's first, `group`
        the warp's number along keys."""
        kb, plan, lane = self.kb, self.plan, self.kb.special("laneid") % 4
        line = group * plan.block_rows + row
        for h in range(2):
            at = self.base + (line + 8 * h) * (4 * plan.pitch)
            if plan.spec.is_quantised:
                at = at + lane * 16
                for j in range(0, len(sums), 2):
                    even, odd = (sums[j + i][2 * h:2 * h + 2] for i in range(2))
                    kb.st("shared", "f32", at.at(32 * j), [even[0], odd[0], even[1], odd[1]])
            else:
                at = at + lane * 8
                for j, cell in enumerate(sums): kb.st("shared", "f32", at.at(32 * j), cell[2 * h:2 * h + 2])
            with kb.if_(lane == 0):
                stats = self.base + (line + 8 * h) * 8
                kb.st("shared", "f32", stats.at(self.stats_start), [row_max[h], row_sum[h]])

    def merge_sums(self, row: Value, column: Value) -> tuple[list[Value], Value, Value]:
        """Four sums of a row, its row_max and row_sum."""
        kb, plan = self.kb, self.plan
        stats, at = self.base + row * 8, self.base + row * (4 * plan.pitch) + column * 4
        groups = range(plan.schedule.warps_n)
        maxima, row_sums = zip(*(kb.ld("shared", "f32", stats.at(self.stats_start + 8 * plan.block_rows * i),
                                      2)
                             for i in groups), strict=True)
        row_max = largest(kb, maxima)
        base = base_of(kb, row_max)
        sums, row_sum = kb.regs("f32", 4, 0.0), kb.reg("f32", 0.0)
        for i in groups:
            weight = power(kb, maxima[i] - base)
            kb.emit("fma.rn.f32", row_sum, row_sums[i], weight, row_sum)
            part = kb.ld("shared", "f32", at.at(4 * plan.block_rows * plan.pitch * i), 4)
            for mine, other in zip(sums, part, strict=True): kb.emit("fma.rn.f32", mine, other, weight, mine)
        return sums, row_max, row_sum


class Combine:
    """The kernel `combine`, a row for each CTA."""

    def __init__(self, kb: Kernel, plan: SplitPlan, given: Parameters) -> None:
        self.kb, self.plan, self.spec, self.given = kb, plan, plan.spec, given
        self.workspace = Workspace(kb, plan, given.workspace)
        self.lane, self.warp = kb.special("laneid"), kb.tid.x >> 5
        self.quads = self.spec.d_v // 4
        self.weights = kb.shared("weights", 4 * MOST_SPLITS)
        self.sums = kb.shared("sums", 4 * COMBINE_WARPS * self.spec.d_v)

    def write(self, count: Value) -> None:
        """Everything for a request of `count` (u32) splits."""
        kb, spec, row, indices = self.kb, self.spec, self.kb.ctaid.x, [self.kb.ctaid.z, self.kb.ctaid.y]
        number = self.workspace.number(indices, row)
        row_max, row_sum = self._weigh(number, count)
        kb.sync()
        for first in range(0, self.quads, 32):
            quad = self.lane + first
            with kb.if_(quad < self.quads):
                place = self.sums.address(self.warp * (4 * spec.d_v)) + quad * 16
                kb.st("shared", "f32", place.at(), self._share(number, quad, count))
        kb.sync()
        with kb.if_(kb.tid.x < self.quads):
            at = self.sums.address(kb.tid.x * 16)
            scale = inverse_sum(kb, spec, self.given.sinks, indices[1], row, row_max, row_sum)
            parts = [kb.ld("shared", "f32", at.at(4 * spec.d_v * i), 4) for i in range(COMBINE_WARPS)]
            made = parts[0]
            for part in parts[1:]: made = [a + b for a, b in zip(made, part, strict=True)]
            store_out(kb, spec, self.given.out, indices, row, kb.tid.x * 4, [value * scale for value in made])

    def _weigh(self, number: Value, count: Value) -> tuple[Value, Value]:
        """The splits' weights, to shared memory; the row_max and row_sum of all."""
        kb, (row_max, row_sum) = self.kb, (self.kb.reg("f32", -math.inf), self.kb.reg("f32", 0.0))
        with kb.if_(self.lane < count):
            stats = kb.ld("global", "f32", self.workspace.stats(number, self.lane).at(), 2)
            row_max.set(stats[0])
            row_sum.set(stats[1])
        most = self._over_lanes(row_max, "max.f32")
        weight = power(kb, row_max - base_of(kb, most))
        with kb.if_(kb.tid.x < MOST_SPLITS):
            kb.st("shared", "f32", self.weights.address(kb.tid.x * 4).at(), weight)
        return most, self._over_lanes(row_sum * weight, "add.f32")

    def _share(self, number: Value, quad: Value, count: Value) -> list[Value]:
        """A warp's part of four columns: every fourth split."""
        kb, taken = self.kb, []
        at = self.workspace.sums(number, self.warp) + (quad * 16).to("u64")
        for first in range(0, self.plan.most_splits, COMBINE_WARPS):
            there, four = self.warp + first < count, kb.regs("f32", 4, 0.0)
            kb.emit("ld.global.v4.f32", four, at.at(4 * self.spec.d_v * first), guard=there)
            weight = kb.ld("shared", "f32", self.weights.address(self.warp * 4).at(4 * first))[0]
            taken.append((four, weight))
        made = kb.regs("f32", 4, 0.0)
        for four, weight in taken:
            for mine, value in zip(made, four, strict=True): kb.emit("fma.rn.f32", mine, value, weight, mine)
        return made

    def _over_lanes(self, value: Value, opcode: str) -> Value:
        """An operation over a warp."""
        kb = self.kb
        for distance in (16, 8, 4, 2, 1):
            other, made = kb.regs("f32", 2)
            kb.emit("shfl.sync.bfly.b32", other, value, distance, 31, -1)
            kb.emit(opcode, made, value, other)
            value = made
        return value
