"""New keys and values into pages, with rotation and rounding, in one launch. For sm_80 and later.

    each CTA has one row of one request:
        wait for the kernel before
        read the request's length; the place of the row, its page: where there is none, no keys and values
        q:    each thread, vectors of heads: load, rotate, store
        k:    the same, into the page
        v:    the same without rotation
        the kernel after may begin

A vector is 8 elements, or 4: 16 bytes of a 16-bit type. Of a rotation that pairs i with i + half a thread has
both vectors; of an interleaved one a vector has whole pairs.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.decode.spec import Pages, Scales
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.kv_append.spec import AppendSpec, Heads, Rope, vector
from tinygrad_nv.tile.lanes import FLOAT16S, packed, to_fp8, unpacked
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU

MOST_THREADS = 256
Operation = tuple[str, Value, Value]  # name, operands


def kv_append(spec: AppendSpec, schedule: Schedule, gpu: GPU) -> TileKernel:
    """The kernel of an append. Parameters in this order: pages of keys, of values; rotated q; k, v; q; table;
    lengths; cos, sin; scales of keys, of values: those that there are."""
    kb = Kernel("kv_append", arch=gpu.arch, threads=_threads(spec))
    _Append(kb, spec).write()
    return TileKernel("kv_append", kb.ptx(), (spec.rows, spec.batch, 1), kb.threads[0], pdl=kb.hopper)


def _threads(spec: AppendSpec) -> int:
    """As many as the largest part has vectors, in whole warps."""
    heads = max(spec.q_heads * spec.d, spec.heads * max(spec.d, spec.d_v))
    return min(MOST_THREADS, -(-heads // vector(spec) // 32) * 32)


@dataclass(frozen=True)
class AppendTarget:
    """Where the heads of a row go: the first of them (u64), elements between them, and the scales (u64) that
    divide them."""
    dtype: DType
    at: Value
    head: int
    scale: tuple[Value, Scales] | None = None


class _Append:
    """The kernel of a spec under construction."""

    def __init__(self, kb: Kernel, spec: AppendSpec) -> None:
        self.kb, self.spec, self.count = kb, spec, vector(spec)
        self.k_pages, self.v_pages = kb.pointer("k_pages"), kb.pointer("v_pages")
        if spec.q: self.q_out = kb.pointer("q_out")
        self.new_k, self.new_v = kb.pointer("k"), kb.pointer("v")
        if spec.q: self.q = kb.pointer("q")
        if spec.table: self.table = kb.pointer("table")
        self.lengths = kb.pointer("lengths")
        if spec.rope: self.cos, self.sin = kb.pointer("cos"), kb.pointer("sin")
        self.scales = {name: kb.pointer(name) for name, scale in
                       (("k_scale", spec.k_scale), ("v_scale", spec.v_scale)) if scale is not None}
        self.row, self.request = kb.ctaid.x, kb.ctaid.y

    def write(self) -> None:
        kb, spec = self.kb, self.spec
        if kb.hopper: kb.wait_for_previous_grid()
        with kb.comment("where the row stands"): self.find()
        if spec.q is not None:
            with kb.comment("q"):
                start = (self.request * spec.rows + self.row).to("u64") * (spec.q_heads * spec.d)
                to = AppendTarget(spec.q.dtype, self.q_out + start * spec.q.dtype.itemsize, spec.d)
                self.part(self.q, spec.q, spec.q_heads, spec.d, spec.rope, to)
        with kb.if_(self.there):
            with kb.comment("keys"):
                to = self.token_of(self.k_pages, spec.k_pages, "k_scale", spec.k_scale)
                self.part(self.new_k, spec.k, spec.heads, spec.d, spec.rope, to)
            with kb.comment("values"):
                to = self.token_of(self.v_pages, spec.v_pages, "v_scale", spec.v_scale)
                self.part(self.new_v, spec.v, spec.heads, spec.d_v, None, to)
        if kb.hopper: kb.launch_dependents()

    def token_of(self, base: Value, pages: Pages, name: str, scale: Scales | None) -> AppendTarget:
        """The row's token in its page."""
        size = pages.dtype.itemsize
        at = self.moved(self.moved(base + pages.offset * size, self.page, pages.page * size), self.token,
                        pages.token * size)
        return AppendTarget(pages.dtype, at, pages.head,
                            None if scale is None else (self.scales[name], scale))

    # **** the row ****

    def find(self) -> None:
        """Its place, page and token, and whether there is a page."""
        kb, spec = self.kb, self.spec
        length = kb.ld("global", "s32", self.moved(self.lengths, self.request, 4).at())[0]
        place = length + self.row.to("s32") - spec.rows
        inside = place.to("u32") < spec.longest
        if spec.table:
            self.page = kb.reg("u32", 0xFFFFFFFF, name="page")
            entry = self.moved(self.moved(self.table, self.request, 4 * spec.pages),
                               place.to("u32") // spec.page_size, 4)
            kb.emit("ld.global.u32", self.page, entry.at(), guard=inside)
        else: self.page = kb.select(inside, self.request, 0xFFFFFFFF, "u32")
        self.there = self.page < spec.stored
        self.token = place.to("u32") % spec.page_size
        if spec.rope is None: return
        kb.emit("max.s32", place, place, 0)
        kb.emit("min.s32", place, place, spec.longest - 1)
        angles = place.to("u32") * spec.rope.half
        self.angles = [self.moved(table, angles, spec.rope.dtype.itemsize) for table in (self.cos, self.sin)]

    def moved(self, base: Value, count: Value, nbytes: int) -> Value:
        """An address (u64) and so many strides (u32) of bytes further."""
        if nbytes < 1 << 31:
            made = self.kb.reg("u64")
            self.kb.emit("mad.wide.u32", made, count, nbytes, base)
            return made
        return base + count.to("u64") * nbytes

    # **** parts ****

    def part(self, source: Value, rows: Heads, heads: int, d: int, rope: Rope | None,
             to: AppendTarget) -> None:
        """The row's heads of q, k or v."""
        size, count = rows.dtype.itemsize, self.count
        base = self.moved(self.moved(source + rows.offset * size, self.request, rows.request * size),
                          self.row, rows.row * size)

        def moving(head: Value, first: Value, elements: int) -> tuple[Value, Value]:
            """Where a vector comes from and where it goes."""
            start = first + elements if elements else first
            return (self.moved(self.moved(base, head, rows.head * size), start, size),
                    self.moved(self.moved(to.at, head, to.head * to.dtype.itemsize), start,
                               to.dtype.itemsize))

        rotated = 2 * rope.half if rope else 0
        if rope is not None:
            width = rotated if rope.interleaved else rope.half
            for head, first in self.each(heads, width // count):
                places = [moving(head, first, 0)]
                if not rope.interleaved: places.append(moving(head, first, rope.half))
                values = [self.load(at, rows.dtype, count) for at, _ in places]
                turned = self.rotated(rope, values, first)
                inverse = self.inverse(to.scale, head)
                for (_, at), each in zip(places, turned, strict=True): self.store(at, to.dtype, each, inverse)
        for head, first in self.each(heads, (d - rotated) // count):
            at, there = moving(head, first, rotated)
            self.store(there, to.dtype, self.load(at, rows.dtype, count), self.inverse(to.scale, head))

    def each(self, heads: int, vectors: int) -> Iterator[tuple[Value, Value]]:
        """This thread's head and first element, vector after vector."""
        kb, threads, total = self.kb, self.kb.threads[0], heads * vectors
        for start in range(0, total, threads):
            index = kb.tid.x + start if start else kb.tid.x
            if start + threads <= total: yield index // vectors, index % vectors * self.count
            else:
                with kb.if_(index < total): yield index // vectors, index % vectors * self.count

    def rotated(self, rope: Rope, values: list[list[Value]], first: Value) -> list[list[Value]]:
        """Vectors after the rotation of their pairs."""
        pairs = len(values[0]) // (2 if rope.interleaved else 1)
        angle = first // 2 if rope.interleaved else first
        cos, sin = (self.load(self.moved(at, angle, rope.dtype.itemsize), rope.dtype, pairs)
                    for at in self.angles)
        if rope.interleaved:
            both = values[0]
            turned = [self.turn(rope, both[2 * i], both[2 * i + 1], cos[i], sin[i]) for i in range(pairs)]
            return [[x for pair in turned for x in pair]]
        turned = [self.turn(rope, values[0][i], values[1][i], cos[i], sin[i]) for i in range(pairs)]
        return [list(column) for column in zip(*turned, strict=True)]

    def turn(self, rope: Rope, a: Value, b: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
        """a cos − b sin, b cos + a sin."""
        kb = self.kb
        if rope.rounded:
            p, q = self.narrowed(("mul", a, cos), ("mul", b, sin), rope.dtype)
            r, s = self.narrowed(("mul", b, cos), ("mul", a, sin), rope.dtype)
            return self.narrowed(("sub", p, q), ("add", r, s), rope.dtype)
        first, second = kb.regs("f32", 2)
        kb.emit("fma.rn.f32", first, a, cos, -(b * sin))
        kb.emit("fma.rn.f32", second, b, cos, a * sin)
        return first, second

    def narrowed(self, first: Operation, second: Operation, dtype: DType) -> tuple[Value, Value]:
        """The results of two operations in float32, each rounded to a dtype."""
        kb, made = self.kb, self.kb.regs("f32", 2)
        for result, (opcode, x, y) in zip(made, (first, second), strict=True):
            kb.emit(f"{opcode}.rn.f32", result, x, y)  # .rn: not to be made one with another
        low, high = made if dtype == dtypes.float32 else unpacked(kb, packed(kb, made, dtype), dtype)
        return low, high

    def inverse(self, scale: tuple[Value, Scales] | None, head: Value) -> Value | None:
        """1 / the scale of the page and a key head."""
        if scale is None: return None
        pointer, lies = scale
        at = self.moved(self.moved(pointer + 4 * lies.offset, self.page, 4 * lies.page), head, 4 * lies.head)
        made = self.kb.reg("f32")
        self.kb.emit("rcp.rn.f32", made, self.kb.ld("global", "f32", at.at())[0])
        return made

    # **** vectors ****

    def load(self, at: Value, dtype: DType, count: int) -> list[Value]:
        """So many elements as f32."""
        words = count * dtype.itemsize // 4
        kind = "f32" if dtype == dtypes.float32 else "b32"
        pieces = [self.kb.ld("global", kind, at.at(4 * i), min(4, words - i)) for i in range(0, words, 4)]
        loaded = [word for piece in pieces for word in piece]
        if dtype == dtypes.float32: return loaded
        return [x for word in loaded for x in unpacked(self.kb, word, dtype)]

    def store(self, at: Value, dtype: DType, values: list[Value], inverse: Value | None) -> None:
        """The elements rounded to a dtype, times the inverse of a scale."""
        kb = self.kb
        if inverse is not None: values = [value * inverse for value in values]
        if dtype == dtypes.float32: words = values
        elif dtype in FLOAT16S: words = [packed(kb, values[i:i + 2], dtype) for i in range(0, len(values), 2)]
        else: words = [self.bytes_of(values[i:i + 4], dtype) for i in range(0, len(values), 4)]
        kind = "f32" if dtype == dtypes.float32 else "b32"
        for i in range(0, len(words), 4): kb.st("global", kind, at.at(4 * i), words[i:i + 4])

    def bytes_of(self, values: list[Value], dtype: DType) -> Value:
        """Four numbers of 8 bits as a b32."""
        kb, made = self.kb, self.kb.reg("b32")
        if dtype != dtypes.int8:
            kb.emit("mov.b32", made, [to_fp8(kb, values[i:i + 2], dtype) for i in (0, 2)])
            return made
        whole = kb.regs("s32", 4)
        for number, value in zip(whole, values, strict=True):
            kb.emit("max.f32", value, value, -128.0)
            kb.emit("min.f32", value, value, 127.0)
            kb.emit("cvt.rni.s32.f32", number, value)
        pairs = kb.regs("b32", 2)
        for pair, (low, high) in zip(pairs, (whole[:2], whole[2:]), strict=True):
            kb.emit("prmt.b32", pair, low, high, 0x0040)
        kb.emit("prmt.b32", made, *pairs, 0x5410)
        return made
