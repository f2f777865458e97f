"""Group norm of channels-last images (spec.py): two kernels. For sm_80 and later.

    each CTA has a slice of an image's positions, a thread `vector` channels of every lanes-th of them
    statistics:  sums of channels in registers, then of groups: the slice's means
                 the slice again, from L1 or L2: squares of distances from these means
                 mean and squares of each group, to the workspace
    results:     mean and variance of each group, of those of all slices
                 (y - mean) / sqrt(variance + eps) * weight + bias, silu, rounded once

Squares are taken from a mean that is known, so that nothing cancels however far the mean is from 0, and
slices are joined by the formula of Chan, Golub and LeVeque (1979). Up to 16 threads add up a group's sums.
The order of all sums is given by the extents of an image.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance, read_vector, write_vector
from tinygrad_nv.tile.group_norm.spec import GroupNormSpec
from tinygrad_nv.tile.group_norm.templates import (
    STATISTIC_BYTES,
    TOGETHER,
    GroupNorm,
    lanes_of,
    threads_of,
)
from tinygrad_nv.tile.kernel import KernelsInTurn, TileKernel
from tinygrad_nv.tile.lanes import Lanes, convert
from tinygrad_nv.tile.template import GPU

LOG2_E = 1.4426950408889634
MOST_PARTS = 16     # threads of a group


def group_norm(spec: GroupNormSpec, plan: GroupNorm, gpu: GPU) -> KernelsInTurn:
    """The kernels. Parameters in this order: out; workspace; x; weight; bias; shift, where there is one."""
    slices = -(-spec.positions // plan.rows)
    kernels = []
    for name, write in (("group_statistics", _Slice.statistics), ("group_norm", _Slice.results)):
        kb = Kernel(name, arch=gpu.arch, threads=threads_of(spec.channels // plan.vector))
        write(made := _Slice(kb, spec, plan, slices))
        kernels.append(TileKernel(name, kb.ptx(), (slices, spec.batch, 1), made.threads, pdl=kb.hopper))
    return KernelsInTurn(tuple(kernels), spec.batch * slices * spec.groups * STATISTIC_BYTES)


@dataclass(frozen=True)
class _Group:
    """A thread's share of a group: the group, which of its threads this is, whether it is one, and whether it
    is the first."""
    number: Value
    part: Value
    there: Value
    first: Value


class _Slice:
    """A kernel under construction: a slice of positions, and a thread's channels."""

    def __init__(self, kb: Kernel, spec: GroupNormSpec, plan: GroupNorm, slices: int) -> None:
        self.kb, self.spec, self.plan, self.slices = kb, spec, plan, slices
        self.columns = spec.channels // plan.vector
        self.lanes, self.threads = lanes_of(self.columns), threads_of(self.columns)
        self.per_group = spec.channels // spec.groups
        self.out, self.workspace, self.x, self.weight, self.bias = (
            kb.pointer(each) for each in ("out", "work", "x", "weight", "bias"))
        self.shift = kb.pointer("shift") if spec.shift is not None else None
        self.space = "global" if kb.hopper else "global.nc"     # as of norm/kernel.py
        self.image, self.slice = kb.ctaid.y, kb.ctaid.x
        self.column, self.lane = kb.tid.x % self.columns, kb.tid.x // self.columns
        whole = self.lanes * self.columns == self.threads
        self.active = None if whole else kb.tid.x < self.lanes * self.columns
        self.start, self.end = self.slice * plan.rows, kb.reg("u32")
        kb.emit("min.u32", self.end, self.start + plan.rows, spec.positions)
        self.parts = max(1, min(MOST_PARTS, self.threads // spec.groups))
        self.of_groups = kb.shared("groups", 8 * spec.groups)
        self.cells = kb.shared("cells", 4 * self.parts * spec.groups)
        if kb.hopper:
            kb.wait_for_previous_grid()
            kb.launch_dependents()
        self.shifts: list[Value] = []
        if self.shift is not None and spec.shift is not None:
            own = advance(kb, self.shift, self.image, spec.channels * spec.shift.itemsize)
            self.shifts = self.channels(own, spec.shift)

    # **** what a thread reads ****

    def channels(self, base: Value, dtype: DType) -> list[Value]:
        """The thread's of a vector of all channels, in float32."""
        at = advance(self.kb, base, self.column, self.plan.vector * dtype.itemsize)
        return self.floats(read_vector(self.kb, at, 0, dtype, self.plan.vector, None, self.space))

    def floats(self, vector: Sequence[Lanes]) -> list[Value]:
        """A vector's elements in float32."""
        kb, found = self.kb, list[Value]()
        for lanes in vector:
            for each in convert(lanes, dtypes.float32).each():
                found.append(each if isinstance(each, Value) else kb.reg("f32", each))
        return found

    def at(self, base: Value) -> Value:
        """Returns the address at which the thread's channels of the image's first position lie."""
        spec, size = self.spec, self.spec.dtype.itemsize
        image = advance(self.kb, base, self.image, spec.positions * spec.channels * size)
        return advance(self.kb, image, self.column, self.plan.vector * size)

    def each(self, use: Callable[[Value, list[Value], Value], None]) -> None:
        """`use(position, its values with the shift, whether it is there)` for every position of the
        thread."""
        kb, spec, at = self.kb, self.spec, self.at(self.x)
        step = self.lanes * TOGETHER
        with kb.loop(0, -(-self.plan.rows // step), kind="u32") as i:
            first, rows = self.start + i * step + self.lane, []
            for row in range(TOGETHER):
                position = first + row * self.lanes if row else first
                there = position < self.end
                if self.active is not None: there = there & self.active
                place = advance(kb, at, position, spec.channels * spec.dtype.itemsize)
                rows.append((position, there, read_vector(kb, place, 0, spec.dtype, self.plan.vector, there,
                                                          self.space)))
            for position, there, vector in rows:
                values = self.floats(vector)
                if self.shifts: values = [x + s for x, s in zip(values, self.shifts, strict=True)]
                use(position, values, there)

    # **** statistics ****

    def statistics(self) -> None:
        """The first kernel."""
        kb, spec = self.kb, self.spec
        self.sums = kb.shared("sums", 4 * self.lanes * spec.channels)
        count = kb.reg("f32")
        kb.emit("cvt.rn.f32.u32", count, (self.end - self.start) * self.per_group)

        def mean(group: Value, total: Value, first: Value) -> None:
            found = kb.reg("f32")
            kb.emit("div.rn.f32", found, total, count)
            kb.emit("st.shared.f32", self.of_groups.address(group * 4).at(), found, guard=first)
        with kb.comment("means of the slice"): self.add_terms(lambda i, x: x, mean, False)
        kb.sync()
        means = self.own(4)

        def keep(group: Value, total: Value, first: Value) -> None:
            number = (self.image * self.slices + self.slice) * spec.groups + group
            found = kb.reg("f32")
            kb.emit("ld.shared.f32", found, self.of_groups.address(group * 4).at())
            kb.emit("st.global.v2.f32", advance(kb, self.workspace, number, STATISTIC_BYTES).at(),
                    [found, total], guard=first)
        with kb.comment("squares of distances from them"): self.add_terms(lambda i, x: x - means[i], keep,
                                                                          True)

    def add_terms(self, term: Callable[[int, Value], Value], use: Callable[[Value, Value, Value], None],
              squared: bool) -> None:
        """`use(group, the sum of its terms or of their squares in this slice, whether this is a warp's first
        lane)`."""
        kb, spec, vector = self.kb, self.spec, self.plan.vector
        totals = kb.regs("f32", vector, 0.0)

        def add(position: Value, values: list[Value], there: Value) -> None:
            for i, (total, x) in enumerate(zip(totals, values, strict=True)):
                value = term(i, x)
                if squared: kb.emit("fma.rn.f32", total, value, value, total, guard=there)
                else: kb.emit("add.f32", total, total, value, guard=there)
        self.each(add)
        mine = self.sums.address((self.lane * spec.channels + self.column * vector) * 4)
        for i, total in enumerate(totals): kb.emit("st.shared.f32", mine.at(4 * i), total, guard=self.active)
        kb.sync()
        for group in self.groups():
            found = kb.reg("f32", 0.0)
            with kb.loop(group.part, self.lanes * self.per_group, self.parts, kind="u32") as cell:
                part, place = kb.reg("f32"), cell // self.per_group * spec.channels + cell % self.per_group
                place = place + group.number * self.per_group
                kb.emit("ld.shared.f32", part, self.sums.address(place * 4).at())
                kb.emit("add.f32", found, found, part)
            use(group.number, self.together(group, found), group.first)

    # **** a group is the work of some threads ****

    def groups(self) -> Iterator[_Group]:
        """Each thread's groups: what uses them is written as often as this yields."""
        kb, count = self.kb, self.spec.groups
        for first in range(0, count, self.threads):
            number, part, there = kb.tid.x % count, kb.tid.x // count, kb.tid.x < self.parts * count
            if count > self.threads:
                number, part, there = kb.reg("u32"), kb.reg("u32", 0), kb.tid.x + first < count
                kb.emit("min.u32", number, kb.tid.x + first, count - 1)
            yield _Group(number, part, there, there & (part == 0))

    def together(self, group: _Group, total: Value) -> Value:
        """The sum of a group's threads, in their order, in all of them."""
        kb, count = self.kb, self.spec.groups
        if self.parts == 1: return total
        kb.emit("st.shared.f32", self.cells.address((group.part * count + group.number) * 4).at(), total,
                guard=group.there)
        kb.sync()
        made, base = kb.reg("f32", 0.0), self.cells.address(group.number * 4)
        for part in range(self.parts):
            one = kb.reg("f32")
            kb.emit("ld.shared.f32", one, base.at(4 * count * part))
            kb.emit("add.f32", made, made, one)
        kb.sync()
        return made

    def own(self, stride: int, offset: int = 0) -> list[Value]:
        """A number of the group of each of the thread's channels, of those in shared memory."""
        kb, found = self.kb, self.kb.regs("f32", self.plan.vector)
        for i, made in enumerate(found):
            group = (self.column * self.plan.vector + i) // self.per_group
            kb.emit("ld.shared.f32", made, self.of_groups.address(group * stride).at(offset))
        return found

    # **** results ****

    def results(self) -> None:
        """The second kernel."""
        kb, spec = self.kb, self.spec
        with kb.comment("mean and 1 / deviation of each group"): self.join_statistics()
        kb.sync()
        means, scales = self.own(8), self.own(8, 4)
        weights, biases = self.channels(self.weight, spec.affine), self.channels(self.bias, spec.affine)
        scales = [scale * weight for scale, weight in zip(scales, weights, strict=True)]
        to = self.at(self.out)

        def put(position: Value, values: list[Value], there: Value) -> None:
            made = []
            for x, mean, scale, bias in zip(values, means, scales, biases, strict=True):
                y = kb.reg("f32")
                kb.emit("fma.rn.f32", y, x - mean, scale, bias)
                made.append(self.silu(y) if spec.silu else y)
            width = min(2, self.plan.vector)
            vector = [convert(Lanes(kb, dtypes.float32, list(made[i:i + width])), spec.dtype)
                      for i in range(0, len(made), width)]
            place = advance(kb, to, position, spec.channels * spec.dtype.itemsize)
            write_vector(kb, place, 0, vector, there)
        with kb.comment("results"): self.each(put)

    def join_statistics(self) -> None:
        """Mean and 1 / deviation of each group of the image, to shared memory."""
        kb, spec = self.kb, self.spec
        count = float(spec.positions * self.per_group)
        for group in self.groups():
            total, spread = kb.regs("f32", 2, 0.0)
            for mean, _, size in self.of_slices(group): kb.emit("fma.rn.f32", total, mean, size, total)
            middle, variance, scale = kb.regs("f32", 3)
            kb.emit("div.rn.f32", middle, self.together(group, total), count)
            for mean, squares, size in self.of_slices(group):
                apart = mean - middle
                kb.emit("fma.rn.f32", spread, apart * apart, size, spread)
                kb.emit("add.f32", spread, spread, squares)
            kb.emit("div.rn.f32", variance, self.together(group, spread), count)
            kb.emit("sqrt.rn.f32", scale, variance + spec.eps)
            kb.emit("rcp.rn.f32", scale, scale)
            kb.emit("st.shared.v2.f32", self.of_groups.address(group.number * 8).at(), [middle, scale],
                    guard=group.first)

    def of_slices(self, group: _Group) -> Iterator[tuple[Value, Value, Value]]:
        """Mean, squares and elements of a group in every parts-th slice, `TOGETHER` of them loaded at a time:
        what uses them is written as often as this yields, within a loop."""
        kb, spec, plan = self.kb, self.spec, self.plan
        usual = float(plan.rows * self.per_group)
        last = float((spec.positions - (self.slices - 1) * plan.rows) * self.per_group)
        with kb.loop(0, -(-self.slices // (self.parts * TOGETHER)), kind="u32") as i:
            found = []
            for k in range(TOGETHER):
                number = (i * TOGETHER + k) * self.parts + group.part
                guard = number < self.slices
                at = (self.image * self.slices + number) * spec.groups + group.number
                mean, squares = kb.regs("f32", 2, 0.0)
                kb.emit("ld.global.v2.f32", [mean, squares],
                        advance(kb, self.workspace, at, STATISTIC_BYTES).at(), guard=guard)
                size = kb.select(number == self.slices - 1, last, usual, "f32")
                found.append((mean, squares, kb.select(guard, size, 0.0, "f32")))
            yield from found

    def silu(self, y: Value) -> Value:
        """y / (1 + exp(-y)). A reciprocal that is rounded to nearest is a call for each element, 751
        instructions in the loop of 32 elements; so there are 324."""
        kb, power, made = self.kb, *self.kb.regs("f32", 2)
        kb.emit("ex2.approx.ftz.f32", power, y * -LOG2_E)
        kb.emit("rcp.approx.ftz.f32", made, power + 1.0)
        return y * made
