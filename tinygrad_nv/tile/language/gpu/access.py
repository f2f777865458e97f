"""Elements side by side in memory, as `Lanes`: pairs, or the one.

Protocol: an address is a register (u64 global, u32 shared) and a constant number of bytes after it. A vector
is a power of two of elements, of up to 16 bytes, at a multiple of its size. Where a guard does not hold,
memory is not touched, and what is read is `other`.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.tile.access import place, store_form
from tinygrad_nv.tile.expression import nearest
from tinygrad_nv.tile.lanes import FLOAT16S, FP8, NARROW, Lanes, bits16, from_fp8, kind_of

WORD = 4


def fetch(kb: Kernel, base: Value, nbytes: int, dtype: DType, count: int, guard: Value | None = None,
            other: float = 0, space: str = "global") -> list[Lanes]:
    """Returns a vector of memory."""
    at, total = place(base, nbytes), count * dtype.itemsize
    if dtype.itemsize == WORD:
        kind = kind_of(dtype)
        made = _words(kb, at, kind, count, guard, float(other) if kind == "f32" else int(other), space)
        return [Lanes(kb, dtype, [*made[i:i + 2]]) for i in range(0, count, 2)]
    bits = _bits(other, dtype)
    if total < WORD: return [_short(kb, at, dtype, count, guard, bits, space)]
    repeated = sum(bits << 8 * dtype.itemsize * i for i in range(WORD // dtype.itemsize))
    words = _words(kb, at, "b32", total // WORD, guard, repeated, space)
    if dtype in FLOAT16S: return [Lanes(kb, dtype, [], word) for word in words]
    return [part for word in words for part in _unpack(kb, word, dtype)]


def _words(kb: Kernel, at: MemoryOperand, kind: str, count: int, guard: Value | None, other: float,
           space: str) -> list[Value]:
    made = kb.regs(kind, count) if guard is None else kb.regs(kind, count, other)
    kb.emit(f"ld.{space}{f'.v{count}' if count > 1 else ''}.{kind}", made if count > 1 else made[0], at,
            guard=guard)
    return made


def _bits(value: float, dtype: DType) -> int:
    """The bits of a number in a dtype of 8 or 16 bits."""
    if dtype in FLOAT16S: return bits16(float(value), dtype)
    if dtype in FP8: return _fp8_bits(nearest(float(value), dtype), dtype)
    if dtype == dtypes.bool: return int(bool(value))
    return int(value) & (1 << 8 * dtype.itemsize) - 1


def _fp8_bits(value: float, dtype: DType) -> int:
    """Returns the bits of a number of the dtype: of e5m2 the upper half of float16; of e4m3 the code of that
    value."""
    if dtype == dtypes.fp8e5m2: return bits16(value, dtypes.float16) >> 8
    if value == 0: return 0
    for code in range(1, 127):
        exponent, rest = code >> 3, code & 7
        number = ((8 * (exponent > 0) + rest) / 8) * 2.0 ** (max(exponent, 1) - 7)
        if number >= abs(value): break
    return code | 0x80 * (value < 0)


def _short(kb: Kernel, at: MemoryOperand, dtype: DType, count: int, guard: Value | None, other: int,
           space: str) -> Lanes:
    """Fewer than four bytes."""
    if count == 2:      # two bytes
        both = kb.reg("b16") if guard is None else kb.reg("b16", other << 8 | other)
        kb.emit(f"ld.{space}.b16", both, at, guard=guard)
        if dtype in FP8: return Lanes(kb, dtype, from_fp8(kb, both, dtype))
        word = kb.reg("b32")
        kb.emit("cvt.u32.u16", word, both)
        return _unpack(kb, word, dtype)[0]
    if dtype in FLOAT16S:
        half = kb.reg("b16") if guard is None else kb.reg("b16", other)
        kb.emit(f"ld.{space}.b16", half, at, guard=guard)
        return Lanes(kb, dtype, halves=[half])
    if dtype in FP8:
        byte = kb.reg("b16") if guard is None else kb.reg("b16", other)
        kb.emit(f"ld.{space}.u8", byte, at, guard=guard)
        return Lanes(kb, dtype, from_fp8(kb, byte, dtype)[:1])
    sign = "s" if dtype in NARROW and not dtypes.is_unsigned(dtype) else "u"
    signed = other - (1 << 8 * dtype.itemsize) if sign == "s" and other >> 8 * dtype.itemsize - 1 else other
    made = kb.reg("s32") if guard is None else kb.reg("s32", signed)
    kb.emit(f"ld.{space}.{sign}{8 * dtype.itemsize}", made, at, guard=guard)
    return Lanes(kb, dtype, [made != 0] if dtype == dtypes.bool else [made])


def _unpack(kb: Kernel, word: Value, dtype: DType) -> list[Lanes]:
    """The elements of four bytes, in pairs."""
    if dtype in FP8:
        halves = kb.regs("b16", 2)
        kb.emit("mov.b32", halves, word)
        return [Lanes(kb, dtype, from_fp8(kb, half, dtype)) for half in halves]
    width = 8 * dtype.itemsize
    opcode = NARROW[dtype][0] if dtype in NARROW else "bfe.u32"
    each = kb.regs("s32", 32 // width)
    for i, made in enumerate(each): kb.emit(opcode, made, word, width * i, width)
    wide = [made != 0 for made in each] if dtype == dtypes.bool else each
    return [Lanes(kb, dtype, [*wide[i:i + 2]]) for i in range(0, len(each), 2)]


def store(kb: Kernel, base: Value, nbytes: int, parts: Sequence[Lanes], count: int,
           guard: Value | None = None,
           space: str = "global", first: int = 0) -> None:
    """Writes a vector, or element `first` of a part."""
    if count == 1:
        kind, words = store_form(kb, parts[0], 1, first)
    else:
        kinds, groups = zip(*(store_form(kb, part, 2) for part in parts), strict=True)
        kind, words = kinds[0], [word for group in groups for word in group]
        if kind == "b16" and len(words) > 1:    # four bytes of two pairs
            joined = []
            for i in range(0, len(words), 2):
                made = kb.reg("b32")
                if words[i].kind == "b16": kb.emit("mov.b32", made, words[i:i + 2])
                else: kb.emit("prmt.b32", made, words[i], words[i + 1], 0x5410)
                joined.append(made)
            kind, words = "b32", joined
    vector = f".v{len(words)}" if len(words) > 1 else ""
    kb.emit(f"st.{space}{vector}.{kind}", place(base, nbytes), words if vector else words[0], guard=guard)
