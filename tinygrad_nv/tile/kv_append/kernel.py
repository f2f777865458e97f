"""New keys and values into pages, with rotation and rounding, in one launch. For sm_80 and later.

    each CTA has one row of one request, and of its q, keys or values a vector for each thread:
        wait for the kernel before; the kernel after may begin
        load the vector
        read the request's length; the place of the row, its page: where there is none, no keys and values
        rotate q and keys; store, keys and values into the page

A vector is 8 elements, or 4: 16 bytes of a 16-bit type. Of a rotation that pairs i with i + half a thread has
both vectors; of an interleaved one a vector has whole pairs. What lies in memory is asked for before the
length is known, so that a row takes three latencies: its length, then page and angles, then the stores.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.decode.spec import Scales
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.kv_append.spec import AppendSpec, Heads, Rope, vector
from tinygrad_nv.tile.lanes import FLOAT16S, pack, to_fp8, unpack
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU

THREADS = 128
Operation = tuple[str, Value, Value]  # name, operands


def kv_append(spec: AppendSpec, schedule: Schedule, gpu: GPU) -> TileKernel:
    """The kernel of an append. Parameters in this order: pages of keys, of values; rotated q; k, v; q; table;
    lengths; cos, sin; scales of keys, of values: those that there are."""
    kb, parts = Kernel("kv_append", arch=gpu.arch, threads=THREADS), _parts(spec)
    _Append(kb, spec).write(parts)
    grid = sum(each.ctas for each in parts), spec.rows, spec.batch
    return TileKernel("kv_append", kb.ptx(), grid, THREADS, pdl=kb.hopper)


@dataclass(frozen=True)
class AppendPart:
    """Vectors of "q", "k" or "v": `vectors` of each of `heads`, from element `first` on."""
    name: str
    heads: int
    vectors: int
    first: int = 0
    rope: Rope | None = None

    @property
    def count(self) -> int: return self.heads * self.vectors

    @property
    def ctas(self) -> int: return -(-self.count // THREADS)


def _parts(spec: AppendSpec) -> list[AppendPart]:
    """Returns the parts that have vectors; what takes longest is first."""
    made, size, rope = [AppendPart("v", spec.heads, spec.d_v // vector(spec))], vector(spec), spec.rope
    rotated = 2 * rope.half if rope else 0
    for name, heads in (("k", spec.heads), ("q", spec.q_heads)):
        made.append(AppendPart(name, heads, (spec.d - rotated) // size, rotated))
        if rope is None: continue
        width = rotated if rope.interleaved else rope.half
        made.append(AppendPart(name, heads, width // size, rope=rope))
    return [each for each in reversed(made) if each.count]


@dataclass(frozen=True)
class AppendTarget:
    """Destination of the heads of a row: the first of them (u64), elements between them, and the scales (u64)
    that divide them."""
    dtype: DType
    at: Value
    head: int
    scale: tuple[Value, Scales] | None = None


class _Append:
    """The kernel of a spec under construction."""

    def __init__(self, kb: Kernel, spec: AppendSpec) -> None:
        self.kb, self.spec, self.count = kb, spec, vector(spec)
        self.pages = {name: (kb.pointer(f"{name}_pages"), pages) for name, pages in
                      (("k", spec.k_pages), ("v", spec.v_pages)) if pages is not None}
        if spec.q: self.q_out = kb.pointer("q_out")
        self.new = {name: (kb.pointer(name), rows) for name, rows in
                    (("k", spec.k), ("v", spec.v), ("q", spec.q)) if rows is not None}
        if spec.table: self.table = kb.pointer("table")
        self.lengths = kb.pointer("lengths")
        if spec.rope: self.cos, self.sin = kb.pointer("cos"), kb.pointer("sin")
        self.scales = {name: kb.pointer(name) for name, scale in
                       (("k_scale", spec.k_scale), ("v_scale", spec.v_scale)) if scale is not None}
        self.row, self.request = kb.ctaid.y, kb.ctaid.z

    def write(self, parts: Sequence[AppendPart]) -> None:
        kb, first = self.kb, 0
        if kb.hopper:
            kb.wait_for_previous_grid()
            kb.launch_dependents()
        for part in parts:
            number = kb.ctaid.x - first if first else kb.ctaid.x
            with kb.comment(f"{part.name} from element {part.first} on"), kb.if_(number < part.ctas):
                index = number * THREADS + kb.tid.x
                if part.count % THREADS == 0: self.part(part, index)
                else:
                    with kb.if_(index < part.count): self.part(part, index)
            first += part.ctas

    def token_of(self, name: str) -> AppendTarget:
        """The row's token in its page."""
        base, pages = self.pages[name]
        scale = self.spec.k_scale if name == "k" else self.spec.v_scale
        size = pages.dtype.itemsize
        at = self.advance_rows(self.advance_rows(base + pages.offset * size, self.page, pages.page * size),
                               self.token,
                        pages.token * size)
        return AppendTarget(pages.dtype, at, pages.head,
                            None if scale is None else (self.scales[f"{name}_scale"], scale))

    # **** the row ****

    def find(self, name: str, rope: Rope | None) -> None:
        """Its place; of keys and values page and token, and whether there is a page; a rotation's angles."""
        kb, spec = self.kb, self.spec
        length = kb.ld("global", "s32", self.advance_rows(self.lengths, self.request, 4).at())[0]
        place = length + self.row.to("s32") - spec.rows
        if name != "q": self.find_page(place)
        if rope is None: return
        kb.emit("max.s32", place, place, 0)
        kb.emit("min.s32", place, place, spec.longest - 1)
        angles = place.to("u32") * rope.half
        self.angles = [self.advance_rows(table, angles, rope.dtype.itemsize)
                       for table in (self.cos, self.sin)]

    def find_page(self, place: Value) -> None:
        """The page of a place, and its token there."""
        kb, spec = self.kb, self.spec
        inside = place.to("u32") < spec.longest
        if spec.table:
            self.page = kb.reg("u32", 0xFFFFFFFF, name="page")
            entry = self.advance_rows(self.advance_rows(self.table, self.request, 4 * spec.pages),
                               place.to("u32") // spec.page_size, 4)
            kb.emit("ld.global.u32", self.page, entry.at(), guard=inside)
        else: self.page = kb.select(inside, self.request, 0xFFFFFFFF, "u32")
        self.there = self.page < spec.stored
        self.token = place.to("u32") % spec.page_size

    def advance_rows(self, base: Value, count: Value, nbytes: int) -> Value:
        """An address (u64) and so many strides (u32) of bytes further."""
        if nbytes < 1 << 31:
            made = self.kb.reg("u64")
            self.kb.emit("mad.wide.u32", made, count, nbytes, base)
            return made
        return base + count.to("u64") * nbytes

    # **** parts ****

    def part(self, part: AppendPart, index: Value) -> None:
        """A thread's vector; both, of a rotation that pairs i with i + half."""
        rope, count = part.rope, self.count
        source, rows = self.new[part.name]
        head, first = index // part.vectors, index % part.vectors * count
        starts = [first + part.first if part.first else first]
        if rope is not None and not rope.interleaved: starts.append(first + rope.half)
        places = [self.place_of(source, rows, head, start) for start in starts]
        values = [self.load(at, rows.dtype, count) for at in places]
        self.find(part.name, rope)
        if rope is not None: values = self.rotate_pairs(rope, values, first)
        if part.name == "q": return self.put(self.rotate_q(), head, starts, values)
        with self.kb.if_(self.there): self.put(self.token_of(part.name), head, starts, values)

    def place_of(self, source: Value, rows: Heads, head: Value, start: Value) -> Value:
        """Returns the address at which an element of the row lies."""
        size, at = rows.dtype.itemsize, source + rows.offset * rows.dtype.itemsize
        strides = (rows.request, rows.row, rows.head, 1)
        for index, stride in zip((self.request, self.row, head, start), strides, strict=True):
            at = self.advance_rows(at, index, stride * size)
        return at

    def put(self, to: AppendTarget, head: Value, starts: Sequence[Value],
            values: Sequence[list[Value]]) -> None:
        """Stores vectors of a head."""
        size, inverse = to.dtype.itemsize, self.inverse(to.scale, head)
        for start, each in zip(starts, values, strict=True):
            at = self.advance_rows(self.advance_rows(to.at, head, to.head * size), start, size)
            self.store(at, to.dtype, each, inverse)

    def rotate_q(self) -> AppendTarget:
        """The row of q_out."""
        spec = self.spec
        assert spec.q is not None
        size, start = spec.q.dtype.itemsize, (self.request * spec.rows + self.row).to("u64")
        return AppendTarget(spec.q.dtype, self.q_out + start * (spec.q_heads * spec.d * size), spec.d)

    def rotate_pairs(self, rope: Rope, values: list[list[Value]], first: Value) -> list[list[Value]]:
        """Vectors after the rotation of their pairs."""
        pairs = len(values[0]) // (2 if rope.interleaved else 1)
        angle = first // 2 if rope.interleaved else first
        cos, sin = (self.load(self.advance_rows(at, angle, rope.dtype.itemsize), rope.dtype, pairs)
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
            p, q = self.narrow_results(("mul", a, cos), ("mul", b, sin), rope.dtype)
            r, s = self.narrow_results(("mul", b, cos), ("mul", a, sin), rope.dtype)
            return self.narrow_results(("sub", p, q), ("add", r, s), rope.dtype)
        first, second = kb.regs("f32", 2)
        kb.emit("fma.rn.f32", first, a, cos, -(b * sin))
        kb.emit("fma.rn.f32", second, b, cos, a * sin)
        return first, second

    def narrow_results(self, first: Operation, second: Operation, dtype: DType) -> tuple[Value, Value]:
        """The results of two operations in float32, each rounded to a dtype."""
        kb, made = self.kb, self.kb.regs("f32", 2)
        for result, (opcode, x, y) in zip(made, (first, second), strict=True):
            kb.emit(f"{opcode}.rn.f32", result, x, y)  # .rn: not to be made one with another
        low, high = made if dtype == dtypes.float32 else unpack(kb, pack(kb, made, dtype), dtype)
        return low, high

    def inverse(self, scale: tuple[Value, Scales] | None, head: Value) -> Value | None:
        """1 / the scale of the page and a key head."""
        if scale is None: return None
        pointer, lies = scale
        at = self.advance_rows(self.advance_rows(pointer + 4 * lies.offset, self.page, 4 * lies.page), head,
                               4 * lies.head)
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
        return [x for word in loaded for x in unpack(self.kb, word, dtype)]

    def store(self, at: Value, dtype: DType, values: list[Value], inverse: Value | None) -> None:
        """The elements rounded to a dtype, times the inverse of a scale."""
        kb = self.kb
        if inverse is not None: values = [value * inverse for value in values]
        if dtype == dtypes.float32: words = values
        elif dtype in FLOAT16S: words = [pack(kb, values[i:i + 2], dtype) for i in range(0, len(values), 2)]
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
