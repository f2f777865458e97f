"""Losses of rows of logits and their gradient (spec.py), for sm_80 and later.

    a CTA, or on Hopper a cluster for a long row, has a row; its threads every `THREADS`-th vector of it:
        wait for the kernel before; the kernel after may begin; an ignored row is 0
        the logit of the row's class, read before anything is written
        x of each logit, kept in shared memory where the row fits:
            m' = max(m, x);  s = s · 2^(m - m') + 2^(x - m'), of a few vectors at a time
        of the row: (m, s) of lanes, then of warps, then of CTAs: each s rescaled to the largest m
        the loss, by the first thread
        each element of the gradient, over its logit or beside it; then that of the class, by its thread

A thread reads again what it has kept itself. Exponentials are ex2.approx; the logarithm of a sum is a series,
since lg2.approx loses digits where a sum is nearly 1.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance, read, write
from tinygrad_nv.tile.cross_entropy.spec import CrossEntropySpec, DistillationSpec, RowsSpec
from tinygrad_nv.tile.cross_entropy.templates import CLUSTERS, THREADS, Rows, wide_of
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.lanes import FLOAT16S, Lanes, across, pack, unpack
from tinygrad_nv.tile.template import GPU

TOGETHER = 4            # vectors of a thread that are under way
WARPS = THREADS // 32
LEAST = -3.4028234663852886e38
LOG2E = math.log2(math.e)


@dataclass
class Sums:
    """Sums of 2^(… - most) of elements, and of such times others; of `most` None, plain sums."""
    most: Value | None
    sums: list[Value]

    @property
    def flat(self) -> list[Value]:
        """The numbers that threads exchange."""
        return [*([] if self.most is None else [self.most]), *self.sums]

    def of(self, flat: list[Value]) -> Sums:
        """Returns sums of other numbers, which are taken from the front."""
        most = None if self.most is None else flat.pop(0)
        return Sums(most, [flat.pop(0) for _ in self.sums])


def cross_entropy(spec: CrossEntropySpec, schedule: Rows, gpu: GPU) -> TileKernel:
    """The kernel of a cross entropy."""
    return _CrossEntropy(spec, schedule, gpu.arch).emit_kernel()


def distillation(spec: DistillationSpec, schedule: Rows, gpu: GPU) -> TileKernel:
    """The kernel of a distillation."""
    return _Distillation(spec, schedule, gpu.arch).emit_kernel()


class _Rows:
    """A kernel of rows under construction."""

    def __init__(self, spec: RowsSpec, schedule: Rows, arch: str) -> None:
        self.spec, self.blocks = spec, schedule.blocks
        assert self.blocks in (1, *CLUSTERS)
        cluster = (1, 1, self.blocks) if self.blocks > 1 else ()
        self.kb = kb = Kernel(schedule.template, arch=arch, threads=THREADS, cluster=cluster)
        self.wide = wide_of(spec)
        vectors = spec.size // self.wide
        self.count = -(-vectors // self.blocks)         # vectors of a CTA
        own = kb.pointer("gradient") if spec.gradient is not None and not spec.in_place else None
        logits = kb.pointer("logits") if spec.in_place else None
        self.losses = kb.pointer("losses")
        self.logits = kb.pointer("logits") if logits is None else logits
        self.gradient = self.logits if own is None else own
        self.labels = kb.pointer("labels")
        self.teacher = kb.pointer("teacher") if isinstance(spec, DistillationSpec) else None
        self.scale = kb.pointer("scale") if spec.scaled else None
        self.parts = kb.shared("parts", 4 * 8 * WARPS)
        if cluster: self.shares = kb.shared("shares", 4 * 8)
        self.kept = kb.shared("kept", 4 * self.wide * self.count) if schedule.kept else None

    def emit_kernel(self) -> TileKernel:
        """The kernel."""
        kb, spec = self.kb, self.spec
        self.row = kb.ctaid.x
        if kb.hopper:
            kb.wait_for_previous_grid()
            kb.launch_dependents()
        self.from_ = advance(kb, self.logits, self.row, spec.size * spec.dtype.itemsize)
        self.to = advance(kb, self.gradient, self.row, spec.size * (spec.gradient or spec.dtype).itemsize)
        self.first = kb.ctaid.z * self.count if self.blocks > 1 else kb.reg("u32", 0)
        self.end = kb.reg("u32")
        kb.emit("min.u32", self.end, self.first + self.count, spec.size // self.wide)
        self.label = kb.ld("global", "s32", advance(kb, self.labels, self.row, 4).at())[0]
        ignored = self.label == spec.loss.ignore_index
        with kb.if_(ignored):
            self.store_loss(kb.reg("f32", 0.0))
            if spec.gradient is not None:
                self.over(self.zeros)
        with kb.else_(): self.of_row()
        grid = (spec.rows, 1, self.blocks)
        return TileKernel(kb.name, kb.ptx(), grid, THREADS, kb.dynamic_smem, (1, 1, self.blocks),
                          pdl=kb.hopper)

    def zeros(self, at: list[Value], guards: list[Value]) -> None:
        """The gradient of an ignored row."""
        values = [self.kb.reg("f32", 0.0)] * self.wide
        for i, guard in zip(at, guards, strict=True): self.put(i, values, guard)

    def of_row(self) -> None: raise NotImplementedError

    # **** elements ****

    def over(self, step: Callable[[list[Value], list[Value]], object]) -> None:
        """`step` of each few vectors of this thread: their numbers, and whether they are there."""
        kb = self.kb
        with kb.loop(self.first + kb.tid.x, self.end, TOGETHER * THREADS, kind="u32") as i:
            at = [i + e * THREADS if e else i for e in range(TOGETHER)]
            step(at, [each < self.end for each in at])

    def fetch_vectors(self, row: Value, dtype: DType, at: list[Value], guards: list[Value],
                value: Callable[[Value], Value]) -> list[list[Value]]:
        """A value of each element of vectors; -infinity where there is none."""
        kb, loaded = self.kb, []
        for i, guard in zip(at, guards, strict=True):
            loaded.append(self.words(advance(kb, row, i, self.wide * dtype.itemsize), dtype, guard))
        return [[kb.select(guard, value(x), -math.inf, "f32") for x in self.floats(words, dtype)]
                for words, guard in zip(loaded, guards, strict=True)]

    def words(self, at: Value, dtype: DType, guard: Value) -> list[Value]:
        """A vector as it lies in memory."""
        kb = self.kb
        if dtype in FLOAT16S and self.wide == 1: return [read(kb, at, 0, dtype, 1, guard).register()]
        kind, count = ("f32", self.wide) if dtype == dtypes.float32 else ("b32", self.wide // 2)
        made = kb.regs(kind, count, 0.0 if kind == "f32" else 0)
        vector = f".v{count}" if count > 1 else ""
        kb.emit(f"ld.global{vector}.{kind}", made if count > 1 else made[0], at.at(), guard=guard)
        return made

    def floats(self, words: list[Value], dtype: DType) -> list[Value]:
        """A vector's elements as float32."""
        if dtype == dtypes.float32 or self.wide == 1: return words
        return [half for word in words for half in unpack(self.kb, word, dtype)]

    def put(self, i: Value, values: Sequence[Value], guard: Value) -> None:
        """Stores a vector of the gradient."""
        kb, dtype = self.kb, self.spec.gradient
        assert dtype is not None
        at = advance(kb, self.to, i, self.wide * dtype.itemsize)
        if self.wide == 1:
            write(kb, at, 0, Lanes(kb, dtype, [values[0]]), 1, guard)
            return
        words, kind = list(values), "f32"
        if dtype in FLOAT16S:
            words, kind = [pack(kb, values[e:e + 2], dtype) for e in range(0, self.wide, 2)], "b32"
        vector = f".v{len(words)}" if len(words) > 1 else ""
        kb.emit(f"st.global{vector}.{kind}", at.at(), words if vector else words[0], guard=guard)

    def keep(self, i: Value, values: list[Value], guard: Value) -> None:
        """x of a vector, in shared memory."""
        if self.kept is None: return
        vector = f".v{self.wide}" if self.wide in (2, 4) else ""
        for e in range(0, self.wide, 4):
            some = values[e:e + 4]
            self.kb.emit(f"st.shared{vector or ('.v4' if self.wide > 4 else '')}.f32", self.place(i, e),
                         some if len(some) > 1 else some[0], guard=guard)

    def place(self, i: Value, e: int) -> object:
        """Returns where element e of a vector is kept."""
        assert self.kept is not None
        return self.kept.address((i - self.first) * (4 * self.wide)).at(4 * e)

    def again(self, at: list[Value], guards: list[Value]) -> list[list[Value]]:
        """x of vectors, once more."""
        kb = self.kb
        if self.kept is None: return self.fetch_vectors(self.from_, self.spec.dtype, at, guards, self.value)
        found = []
        for i, guard in zip(at, guards, strict=True):
            vector = kb.regs("f32", self.wide, 0.0)
            for e in range(0, self.wide, 4):
                some = vector[e:e + 4]
                kb.emit(f"ld.shared{f'.v{len(some)}' if len(some) > 1 else ''}.f32",
                        some if len(some) > 1 else some[0], self.place(i, e), guard=guard)
            found.append(vector)
        return found

    # **** numbers ****

    def value(self, l: Value) -> Value:
        """x of a logit."""
        loss = self.spec.loss
        if loss.softcap is None: return l if loss.divisor == 1 else l / float(loss.divisor)
        return self.tanh(l / float(loss.divisor * loss.softcap)) * float(loss.softcap)

    def slope(self, x: Value) -> Value | float:
        """dx / dl."""
        loss = self.spec.loss
        if loss.softcap is None: return 1.0 / loss.divisor
        kept = x * (1 / loss.softcap)
        return (1.0 - kept * kept) * (1 / loss.divisor)

    def tanh(self, x: Value) -> Value:
        """(1 - e) / (1 + e) with e = exp(-2 |x|), which loses digits of small x: a series to x^9 there."""
        kb = self.kb
        far, size, near = kb.reg("f32"), kb.reg("f32"), kb.reg("f32", 0.021869488)
        kb.emit("abs.f32", size, x)
        e = self.exp2(size * (-2 * LOG2E))
        kb.emit("div.full.f32", far, 1.0 - e, e + 1.0)
        kb.emit("copysign.f32", far, x, far)
        t = x * x
        for factor in (-0.053968254, 0.13333333, -0.33333333): kb.emit("fma.rn.f32", near, near, t, factor)
        near = near * t * x + x
        return kb.select(size < 0.25, near, far, "f32")

    def exp2(self, x: Value) -> Value:
        """2^x."""
        made = self.kb.reg("f32")
        self.kb.emit("ex2.approx.ftz.f32", made, x)
        return made

    def exp(self, x: Value) -> Value:
        """e^x."""
        return self.exp2(x * LOG2E)

    def log(self, x: Value) -> Value:
        """The logarithm of a number from 2^-126 on, by the series of that of (1 + s) / (1 - s)."""
        kb, bits, exponent, rest = self.kb, *self.kb.regs("s32", 3)
        kb.emit("mov.b32", bits, x)
        kb.emit("sub.s32", exponent, bits, 0x3F3504F3)  # the bits of √½: m lies in [√½, √2)
        kb.emit("shr.s32", exponent, exponent, 23)
        kb.emit("sub.s32", rest, bits, exponent << 23)
        m, s = kb.regs("f32", 2)
        kb.emit("mov.b32", m, rest)
        kb.emit("div.rn.f32", s, m - 1.0, m + 1.0)
        t, y, made = s * s, kb.reg("f32", 2 / 11), kb.reg("f32")
        for power in (9, 7, 5, 3, 1): kb.emit("fma.rn.f32", y, y, t, 2 / power)
        kb.emit("fma.rn.f32", made, exponent.to("f32"), math.log(2), y * s)
        return made

    # **** sums of a row ****

    def of_all(self, mine: list[Sums]) -> list[Sums]:
        """Sums of this thread to those of the row, in all of its threads."""
        kb, lane, warp = self.kb, self.kb.tid.x & 31, self.kb.tid.x >> 5
        mine = self.across(mine, 32)
        numbers = [x for each in mine for x in each.flat]
        for slot, x in enumerate(numbers):
            kb.emit("st.shared.f32", self.parts.address(warp * 4).at(4 * WARPS * slot), x, guard=lane == 0)
        kb.sync()
        found = [kb.ld("shared", "f32", self.parts.address((lane & (WARPS - 1)) * 4).at(4 * WARPS * slot))[0]
                 for slot in range(len(numbers))]
        made = self.across([each.of(found) for each in mine], WARPS)
        return made if self.blocks == 1 else self.of_cluster(made)

    def across(self, mine: list[Sums], lanes: int) -> list[Sums]:
        """Adds the sums of so many lanes, in all of them."""
        kb, made = self.kb, []
        for each in mine:
            if each.most is None: most, sums = None, each.sums
            else:
                most = across(kb, each.most, "max.f32", lanes)
                rescale = self.exp(each.most - most)
                sums = [x * rescale for x in each.sums]
            made.append(Sums(most, [across(kb, x, "add.f32", lanes) for x in sums]))
        return made

    def of_cluster(self, mine: list[Sums]) -> list[Sums]:
        """Adds the sums of the CTAs of a row, in their order."""
        kb = self.kb
        numbers = [x for each in mine for x in each.flat]
        for slot, x in enumerate(numbers):
            kb.emit("st.shared.f32", self.shares.address().at(4 * slot), x, guard=kb.tid.x == 0)
        kb.cluster_arrive()
        kb.cluster_wait()
        ranks: list[list[Sums]] = []
        for rank in range(self.blocks):
            at, found = kb.mapa(self.shares.address(), rank), kb.regs("f32", len(numbers))
            for slot, x in enumerate(found): kb.emit("ld.shared::cluster.f32", x, at.at(4 * slot))
            ranks.append([each.of(found) for each in mine])
        kb.cluster_arrive()     # shared memory is there as long as others read it
        made = [self.join_sums([rank[i] for rank in ranks]) for i in range(len(mine))]
        kb.cluster_wait()
        return made

    def join_sums(self, several: list[Sums]) -> Sums:
        """Sums of several, one after the other."""
        kb, most = self.kb, several[0].most
        if most is not None:
            top = kb.reg("f32", LEAST)
            for each in several: kb.emit("max.f32", top, top, each.most)
            most = top
        sums = [kb.reg("f32", 0.0) for _ in several[0].sums]
        for each in several:
            rescale = 1.0 if each.most is None or most is None else self.exp(each.most - most)
            for total, x in zip(sums, each.sums, strict=True): total += x * rescale
        return Sums(most, sums)

    def raise_max(self, sums: Sums, vectors: list[list[Value]]) -> Value:
        """`most` of sums not below the elements of vectors, and the sums rescaled to it."""
        kb, before = self.kb, self.kb.reg("f32")
        assert sums.most is not None
        kb.emit("mov.f32", before, sums.most)
        for vector in vectors:
            for x in vector: kb.emit("max.f32", sums.most, sums.most, x)
        rescale = self.exp(before - sums.most)
        for each in sums.sums: each *= rescale
        return sums.most

    # **** results ****

    def store_loss(self, loss: Value) -> None:
        """The row's loss, by the first thread of its first CTA."""
        kb = self.kb
        first = kb.tid.x == 0
        if self.blocks > 1: first = first & (kb.ctaid.z == 0)
        kb.emit("st.global.f32", advance(kb, self.losses, self.row, 4).at(), loss, guard=first)

    def factor(self) -> Value:
        """w of the row."""
        kb = self.kb
        if self.scale is None: return kb.reg("f32", 1.0)
        return kb.ld("global", "f32", advance(kb, self.scale, self.row, 4).at())[0]


class _CrossEntropy(_Rows):
    """Cross entropy."""

    def of_row(self) -> None:
        kb, spec, loss = self.kb, self.spec, self.spec.loss
        known = (self.label >= 0) & (self.label < spec.size)
        at = advance(kb, self.from_, kb.select(known, self.label, 0, "s32").to("u32"), spec.dtype.itemsize)
        own = self.value(read(kb, at, 0, spec.dtype, 1).register())
        soft, far = Sums(kb.reg("f32", LEAST), [kb.reg("f32", 0.0)]), Sums(None, [kb.reg("f32", 0.0)])

        def sum_vectors(at: list[Value], guards: list[Value]) -> None:
            vectors = self.fetch_vectors(self.from_, spec.dtype, at, guards, self.value)
            most = self.raise_max(soft, vectors)
            for i, vector, guard in zip(at, vectors, guards, strict=True):
                if spec.gradient is not None: self.keep(i, vector, guard)
                for x in vector:
                    total = soft.sums[0]
                    total += self.exp(x - most)
                    if loss.label_smoothing: kb.emit("add.f32", far.sums[0], far.sums[0], x, guard=guard)
        self.over(sum_vectors)
        stats = self.of_all([soft, *([far] if loss.label_smoothing else [])])
        most, total = stats[0].flat
        log, smoothing = self.log(total), loss.label_smoothing
        value = kb.select(known, most - own, math.nan, "f32") + log
        if smoothing:
            value = value * (1 - smoothing) + (most - stats[1].sums[0] * (1 / spec.size) + log) * smoothing
        lse = most + log
        if loss.z_loss: value = value + lse * lse * loss.z_loss
        self.store_loss(value)
        if spec.gradient is not None: self.gradients(own, most, total, lse, known)

    def gradients(self, own: Value, most: Value, total: Value, lse: Value, known: Value) -> None:
        """Writes the gradients of all logits, then that of the class, whose thread has written it before."""
        kb, spec, loss = self.kb, self.spec, self.spec.loss
        w, even = self.factor(), loss.label_smoothing / spec.size
        inverse = kb.reg("f32", 1.0) / total
        z = lse * (2 * loss.z_loss) if loss.z_loss else None
        p = inverse if z is None else inverse * z + inverse

        def finish_element(x: Value, value: Value) -> Value:
            slope = self.slope(x)
            return value * w if isinstance(slope, float) and slope == 1 else value * slope * w

        def store_vectors(at: list[Value], guards: list[Value]) -> None:
            for i, vector, guard in zip(at, self.again(at, guards), guards, strict=True):
                values = [self.exp(x - most) * p for x in vector]
                if even: values = [value - even for value in values]
                made = [finish_element(x, value) for x, value in zip(vector, values, strict=True)]
                self.put(i, made, guard)
        self.over(store_vectors)
        q = self.exp(own - most) * inverse
        mine = q - (1 - loss.label_smoothing)
        if z is not None: mine = mine + q * z
        if even: mine = mine - even
        index = self.label.to("u32")
        vector = index // self.wide if self.wide > 1 else index
        here = known & (vector >= self.first) & (vector < self.end)
        here = here & ((vector - self.first) % THREADS == kb.tid.x)
        assert spec.gradient is not None
        at = advance(kb, self.to, kb.select(known, index, 0, "u32"), spec.gradient.itemsize)
        write(kb, at, 0, Lanes(kb, spec.gradient, [finish_element(own, mine)]), 1, here)


class _Distillation(_Rows):
    """Distillation: the teacher's row is read in each pass."""
    spec: DistillationSpec

    def of_row(self) -> None:
        kb, spec, t = self.kb, self.spec, self.spec.temperature
        assert self.teacher is not None
        self.taught = advance(kb, self.teacher, self.row, spec.size * spec.teacher.itemsize)
        x_sums = Sums(kb.reg("f32", LEAST), [kb.reg("f32", 0.0)])
        y_sums = Sums(kb.reg("f32", LEAST), kb.regs("f32", 2, 0.0))

        def sum_vectors(at: list[Value], guards: list[Value]) -> None:
            xs = self.fetch_vectors(self.from_, spec.dtype, at, guards, self.value)
            if spec.gradient is not None:
                for i, vector, guard in zip(at, xs, guards, strict=True): self.keep(i, vector, guard)
            xs = [[x / t if t != 1 else x for x in vector] for vector in xs]
            ys = self.teachers(at, guards)
            most, top = self.raise_max(x_sums, xs), self.raise_max(y_sums, ys)
            for x, y in ((x, y) for a, b in zip(xs, ys, strict=True) for x, y in zip(a, b, strict=True)):
                e, (total, mass, cross) = self.exp(y - top), (*x_sums.sums, *y_sums.sums)
                total += self.exp(x - most)
                mass += e
                kb.emit("fma.rn.f32", cross, e, y - x, cross, guard=e != 0.0)
        self.over(sum_vectors)
        (most, total), (top, mass, cross) = (each.flat for each in self.of_all([x_sums, y_sums]))
        value = (cross / mass - (top - most)) + (self.log(total) - self.log(mass))
        self.store_loss(value * (t * t))
        if spec.gradient is None: return
        w, p, q = self.factor() * t, kb.reg("f32", 1.0) / total, kb.reg("f32", 1.0) / mass

        def store_vectors(at: list[Value], guards: list[Value]) -> None:
            both = zip(at, self.again(at, guards), self.teachers(at, guards), guards, strict=True)
            for i, vector, taught, guard in both:
                made = []
                for x, y in zip(vector, taught, strict=True):
                    z = x / t if t != 1 else x
                    made.append((self.exp(z - most) * p - self.exp(y - top) * q) * self.slope(x) * w)
                self.put(i, made, guard)
        self.over(store_vectors)

    def teachers(self, at: list[Value], guards: list[Value]) -> list[list[Value]]:
        """y of vectors."""
        t = self.spec.temperature
        return self.fetch_vectors(self.taught, self.spec.teacher, at, guards,
                                  lambda y: y / t if t != 1 else y)
