"""Elements of an epilogue in memory: read as `Lanes`, written from them, one or two at a time.

Protocol: an address is a register (u64 global, u32 shared) and a constant number of bytes after it. With a
guard, memory is touched only where it holds, and what is read elsewhere is 0.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.tile.attention.spec import Rows
from tinygrad_nv.tile.lanes import FLOAT16S, FP8, NARROW, Lanes, from_fp8, kind_of, to_fp8

MOST_OFFSET = 1 << 23  # bytes that fit in an instruction


def place(base: Value, nbytes: int) -> MemoryOperand:
    """`nbytes` after an address."""
    if -MOST_OFFSET <= nbytes < MOST_OFFSET: return base.at(nbytes)
    return (base + nbytes if nbytes > 0 else base - -nbytes).at()


def advance(kb: Kernel, base: Value, index: Value, nbytes: int) -> Value:
    """`base` (u64) plus `index` (u32) times a stride in bytes."""
    if nbytes == 0: return base
    if not 0 < nbytes < 1 << 31:
        step = index.to("u64") * abs(nbytes)
        return base + step if nbytes > 0 else base - step
    made = kb.reg("u64")
    kb.emit("mad.wide.u32", made, index, nbytes, base)
    return made


def row_start(kb: Kernel, pointer: Value, rows: Rows, batch: Sequence[Value], first: Value) -> Value:
    """Returns the address at which row `first` (u32) of an element of the batch begins; of indices that are
    left out, the first."""
    at = kb.reg("u64", rows.offset)
    strides = (*rows.batch[:len(batch)], rows.row)
    for index, stride in zip((*batch, first), strides, strict=True):
        if stride: at = at + index.to("u64") * stride
    return pointer + at * rows.dtype.itemsize


def read(kb: Kernel, base: Value, nbytes: int, dtype: DType, count: int, guard: Value | None = None,
         space: str = "global") -> Lanes:
    """`count` (1 or 2) elements side by side."""
    at = place(base, nbytes)

    def fetch(kind: str, memory: str, number: int) -> list[Value]:
        made = kb.regs(kind, number) if guard is None else kb.regs(kind, number, 0.0 if kind == "f32" else 0)
        vector = f".v{number}" if number > 1 else ""
        kb.emit(f"ld.{space}{vector}.{memory}", made if number > 1 else made[0], at, guard=guard)
        return made

    if dtype in FLOAT16S:
        if count == 2: return Lanes(kb, dtype, [], fetch("b32", "b32", 1)[0])
        half, wide = fetch("b16", "b16", 1)[0], kb.reg("f32")
        kb.emit(f"cvt.f32.{FLOAT16S[dtype]}", wide, half)
        return Lanes(kb, dtype, [wide])
    if dtype in FP8:
        pair = fetch("b16", "b16" if count == 2 else "u8", 1)[0]
        return Lanes(kb, dtype, from_fp8(kb, pair, dtype)[:count])
    if dtype == dtypes.bool:
        return Lanes(kb, dtype, [byte != 0 for byte in fetch("u32", "u8", count)])
    if dtype in NARROW:
        sign = "u" if dtypes.is_unsigned(dtype) else "s"
        return Lanes(kb, dtype, list(fetch("s32", f"{sign}{8 * dtype.itemsize}", count)))
    kind = "f32" if dtype == dtypes.float32 else "u32" if dtype == dtypes.uint32 else "s32"
    return Lanes(kb, dtype, list(fetch(kind, kind, count)))


def read_vector(kb: Kernel, base: Value, nbytes: int, dtype: DType, count: int, guard: Value | None = None,
                space: str = "global") -> list[Lanes]:
    """`count` elements side by side, a power of two of up to 16 bytes, at a multiple of their size: pairs, or
    the one."""
    if count == 1: return [read(kb, base, nbytes, dtype, 1, guard, space)]
    if dtype not in FLOAT16S and dtype.itemsize != 4:
        return [read(kb, base, nbytes + i * dtype.itemsize, dtype, 2, guard, space)
                for i in range(0, count, 2)]
    words, kind = count * dtype.itemsize // 4, "b32" if dtype in FLOAT16S else kind_of(dtype)
    made = kb.regs(kind, words) if guard is None else kb.regs(kind, words, 0.0 if kind == "f32" else 0)
    for i in range(0, words, 4):
        piece = made[i:i + 4]
        some = f".v{len(piece)}" if len(piece) > 1 else ""
        kb.emit(f"ld.{space}{some}.{kind}", piece if some else piece[0], place(base, nbytes + 4 * i),
                guard=guard)
    if dtype in FLOAT16S: return [Lanes(kb, dtype, [], word) for word in made]
    return [Lanes(kb, dtype, [*made[i:i + 2]]) for i in range(0, words, 2)]


def write(kb: Kernel, base: Value, nbytes: int, value: Lanes, count: int, guard: Value | None = None,
          space: str = "global", first: int = 0) -> None:
    """`count` (1 or 2) elements side by side, from element `first` on."""
    kind, words = store_form(kb, value, count, first)
    vector = ".v2" if len(words) > 1 else ""
    kb.emit(f"st.{space}{vector}.{kind}", place(base, nbytes), words if len(words) > 1 else words[0],
           guard=guard)


def write_vector(kb: Kernel, base: Value, nbytes: int, values: Sequence[Lanes],
                 guard: Value | None = None) -> None:
    """Writes what `read_vector` gives, of float32 or 16 bits, to global memory at a multiple of its size."""
    first = values[0]
    if len(values) == 1 and first.packed is None and len(first.wide) == 1:
        return write(kb, base, nbytes, first, 1, guard)
    words = [word for each in values for word in store_form(kb, each, 2)[1]]
    for i in range(0, len(words), 4):
        piece = words[i:i + 4]
        some = f".v{len(piece)}" if len(piece) > 1 else ""
        kb.emit(f"st.global{some}.b32", place(base, nbytes + 4 * i), piece if some else piece[0], guard=guard)


def store_form(kb: Kernel, value: Lanes, count: int, first: int = 0) -> tuple[str, list[Value]]:
    """The type of a store and its registers."""
    dtype = value.dtype
    if dtype in FLOAT16S: return ("b32", [value.pair()]) if count == 2 else ("b16", [value.half(first)])
    if dtype in FP8:
        each = [value.at(first)] if count == 1 else value.each()
        return ("b16" if count == 2 else "b8"), [to_fp8(kb, each, dtype)]
    words = [kb.select(value.register(i), 1, 0, "s32") if dtype == dtypes.bool else value.register(i)
             for i in range(first, first + count)]
    if dtype.itemsize == 4 or count == 1: return f"b{8 * dtype.itemsize}", words
    pair = kb.reg("b32")  # bytes, or halves, of both
    kb.emit("prmt.b32", pair, words[0], words[1], 0x0040 if dtype.itemsize == 1 else 0x5410)
    return ("b16" if dtype.itemsize == 1 else "b32"), [pair]
