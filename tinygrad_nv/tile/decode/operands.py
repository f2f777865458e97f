"""Operands of a decode kernel's products: queries, keys and values as fragments of mma.m16n8k16.

Protocol: fragments are those of fragments.py, g = lane / 4, q = lane % 4. `Keys.of(step)` gives two registers
for each 8 keys, for 16 elements of the head; `Values.of(step)` two for each 8 columns of the result, for 16
keys.

Keys and values of 8 bits become q's dtype on their way. A register of four bytes has two registers' worth of
operands, which permutes the elements, equally for both sides of a product:

    keys    bytes 4q … 4q + 3 of 16 elements are k = 2q, 2q + 1, 2q + 8, 2q + 9: a lane takes elements
            4q … 4q + 3 of q's rows as well
    values  ldmatrix.trans moves pairs of columns: of 16 columns, the even ones are one tile of the result,
            the odd ones another, and a lane's four sums of a row are columns 4q … 4q + 3
"""
from __future__ import annotations

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.fragments import STEP_BYTES, Fragments
from tinygrad_nv.tile.layout import SharedTile

Pairs = list[list[Value]]  # by 8 keys or columns: two registers
# how bytes in the upper halves of 16 bits become 16-bit floats: shifted right by, these bits kept beside the
# sign, times this power of two, by which the exponents' offsets differ; None where they are such already
WIDENED = {(dtypes.fp8e4m3, dtypes.float16): (1, 0x3F803F80, 0x5C005C00),
           (dtypes.fp8e4m3, dtypes.bfloat16): (4, 0x07F007F0, 0x7B807B80),
           (dtypes.fp8e5m2, dtypes.float16): None,
           (dtypes.fp8e5m2, dtypes.bfloat16): (3, 0x0FE00FE0, 0x77807780)}


class Keys:
    """Fragments of a warp's tile of keys, `start` bytes after a stage's beginning."""

    def __init__(self, kb: Kernel, dtype: DType, wide: DType, tile: SharedTile, d: int, start: int) -> None:
        self.kb, self.dtype, self.wide = kb, dtype, wide
        self.per_load = STEP_BYTES // dtype.itemsize // 16  # steps of 16 elements that one load has
        self.fragments = Fragments(kb, dtype, tile, False, True, kb.reg("u32", 0), tile.rows,
                                   d // 16 // self.per_load, start)
        self.loaded: list[list[Value]] = []

    def of(self, step: int) -> Pairs:
        """Returns the pairs of 16 elements of the head; steps in order."""
        load, half = divmod(step, self.per_load)
        if half == 0:
            self.loaded = self.fragments.registers()
            self.fragments.load(load, self.loaded)
        eights = [four[at:at + 2] for four in self.loaded for at in (0, 2)]
        if self.per_load == 1: return eights
        return [[widen_bytes(self.kb, two[half], at, at + 1, self.dtype, self.wide) for at in (0, 2)]
                for two in eights]


class Values:
    """Operands of values."""

    def __init__(self, kb: Kernel, dtype: DType, wide: DType, tile: SharedTile, d_v: int, start: int) -> None:
        self.kb, self.dtype, self.wide = kb, dtype, wide
        # pairs of bytes are moved as elements of 16 bits
        self.fragments = Fragments(kb, wide, tile, True, True, kb.reg("u32", 0), d_v * dtype.itemsize // 2,
                                   tile.rows // 16, start)

    def of(self, step: int) -> Pairs:
        """Returns the pairs of 16 keys."""
        loaded = self.fragments.registers()
        self.fragments.load(step, loaded)
        eights = [four[at:at + 2] for four in loaded for at in (0, 2)]
        if self.dtype.itemsize == 2: return eights
        return [[widen_bytes(self.kb, word, at, at + 2, self.dtype, self.wide) for word in two]
                for two in eights for at in (0, 1)]


def widen_bytes(kb: Kernel, word: Value, first: int, second: int, dtype: DType, wide: DType) -> Value:
    """Two bytes of a b32 as two numbers of a 16-bit float, exactly."""
    made = kb.reg("b32")
    if dtype == dtypes.int8: return _integers(kb, word, first, second, wide, made)
    kb.emit("prmt.b32", made, word, 0, second << 12 | 4 << 8 | first << 4 | 4)
    if (places := WIDENED[dtype, wide]) is None: return made
    (shift, keep, power), moved = places, kb.reg("b32")
    kb.emit("shr.u32", moved, made, shift)
    kept = (moved & keep) | (made & 0x80008000)
    return _fma(kb, wide, kept, kb.reg("b32", power), kb.reg("b32", 0x80008000))


def _integers(kb: Kernel, word: Value, first: int, second: int, wide: DType, made: Value) -> Value:
    """A byte x with its sign s is (128 + x mod 128) − (128 + 128 s): both are bytes with a constant above
    them, which is 128 in bfloat16, and 1024 in float16."""
    high = 0x43434343 if wide == dtypes.bfloat16 else 0x64646464
    kb.emit("prmt.b32", made, word, high, 4 << 12 | second << 8 | 4 << 4 | first)
    minus_one = kb.reg("b32", 0xBF80BF80 if wide == dtypes.bfloat16 else 0xBC00BC00)
    return _fma(kb, wide, made & 0xFF80FF80, minus_one, made & 0xFF7FFF7F)


def _fma(kb: Kernel, wide: DType, a: Value, b: Value, c: Value) -> Value:
    """a · b + c, of two numbers each."""
    made = kb.reg("b32")
    kb.emit(f"fma.rn.{'bf16x2' if wide == dtypes.bfloat16 else 'f16x2'}", made, a, b, c)
    return made
