"""Codes in fragments (quant/types.py) as operands of mma: a lane's pairs of 16-bit floats, in registers.

Protocol: `Decoder.operand(words, step, offsets)` are the four registers of operand A of mma.m16n8k16 for 16
columns of a unit, the same as two operands B. Elements are exact; scales are not in them. Integers are made
without a conversion: or-ed into the mantissa of 128 (bfloat16) or 1024 (float16), where the last bit counts
1, from which 128 and what is to be subtracted is taken (the `offsets`, one register for each of a lane's two
rows). Floats of 8, 6 and 4 bits are placed: sign, exponent and mantissa moved to where they are in a 16-bit
float, which is the number times a power of two, subnormal ones too; infinities and NaN are taken for numbers
(`QTensor.finite`). As Marlin (Frantar et al. 2024) does. Numbers of a codebook of 4 bits (NF4) are rounded to
16 bits and looked up in registers: prmt takes a byte of 8 entries for each of four codes.

    bits     what of a pair                                instructions for each pair
    ≤ 4      (w >> i & 0x000F000F | 0x43004300) − offset   2 and a shift; float16 does with every other shift
    5, 6     the same of two planes                        4
    8        (w & 0x007F007F | 0x43004300) − (w & 0x00800080 | 0x43004300), signed
    book     upper and lower bytes: of entries 0 to 7, of 8 to 15, by bit 3; put together      5.5
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.quant.types import E2M1, E2M3, QType
from tinygrad_nv.tile.gemm.spec import FP8
from tinygrad_nv.tile.lanes import bits16

AND_OR = 0xEA                   # lop3: (a & b) | c
BOTH = 0x00010001               # a number in both halves
BASE = {dtypes.bfloat16: 0x4300, dtypes.float16: 0x6400}    # 128 and 1024, whose last bit counts 1
ONE = {dtypes.bfloat16: 0x3F80, dtypes.float16: 0x3C00}
SIXTEENTH = 0x2C00      # 1/16 in float16
NAMES = {dtypes.bfloat16: "bf16", dtypes.float16: "f16"}
MANTISSA = {dtypes.bfloat16: 7, dtypes.float16: 10}
BIAS = {dtypes.bfloat16: 127, dtypes.float16: 15}
# bits of the mantissa, bias of the exponent
SMALL = {dtypes.fp8e4m3: (3, 7), dtypes.fp8e5m2: (2, 15)}
PLACED = {E2M1: (1, 1), E2M3: (3, 1)}
Words = Mapping[str, Sequence[Value]]


def problems(type: QType) -> list[str]:
    """Why there is no decoder of a type; empty where there is."""
    if type.layout != "fragments": return ["a matrix that is not in fragments"]
    out = []
    if looks_up(type) and type.bits != 4: out.append(f"a codebook of {type.bits} bits, {type.element}")
    if (type.element.dtype in FP8 or type.element.values) and (type.shift or type.zeros):
        out.append("zero points of floats")
    for name, scale in (("scales", type.scale), ("outer scales", type.outer)):
        if scale is None or not (columns := scale.columns): continue
        if columns % 16 or max(columns, type.unit) % min(columns, type.unit):
            out.append(f"{name} of {columns} columns: 16, 32 or a multiple of {type.unit}")
    if type.outer is not None and (columns := type.outer.columns) and (
            not type.scale.columns or columns % type.scale.columns):
        out.append(f"outer scales of {columns} columns, no multiple of those of scales")
    if type.divided or type.outer_last: out.append("outer scales that divide, or come last")
    if type.permuted: out.append("columns in another order than inputs")
    return out


def looks_up(type: QType) -> bool:
    """Whether codes are looked up in a codebook."""
    return bool(type.element.values) and type.element not in PLACED


@dataclass
class Decoder:
    """Decoder of a type's codes, to pairs of `dtype`."""
    kb: Kernel
    type: QType
    dtype: DType

    def __post_init__(self) -> None:
        self.made: dict[int, Value] = {}

    @property
    def planes(self) -> dict[str, int]:
        """Bits of each."""
        high = self.type.bits - self.type.low_bits
        return {"codes": self.type.low_bits} | ({"high": high} if high else {})

    def words(self, name: str) -> int:
        """u32 of a lane's unit."""
        return self.type.unit * self.planes[name] // 64

    # **** what is subtracted ****

    @property
    def integers(self) -> bool: return not self.type.element.values and self.type.element.dtype not in FP8

    @property
    def sixteenths(self) -> bool:
        """Whether every other field is read where it is, sixteen times as large."""
        return self.integers and self.type.bits == 4 and self.dtype == dtypes.float16

    @property
    def offset_count(self) -> int:
        """Registers of `offsets` of a row with a zero point."""
        return 1 + self.sixteenths if self.integers else 0

    def offsets(self, zero: Value | None) -> list[Value]:
        """Registers for `operand` of a row with zero point `zero`, u32: that of fields as they are, and that
        of fields sixteen times as large, if there are such. Empty where nothing is subtracted."""
        if not self.integers: return []
        if self.type.bits == 8: return self._offset_of_bytes(zero)
        places = [(BOTH, (BASE[self.dtype] | 0x8000) + self.type.shift)]
        # −(64 + z): its last bit counts 1/16
        if self.sixteenths: places.append((16 * BOTH, 0xD400 + 16 * self.type.shift))
        if zero is None: return [self.constant(base * BOTH) for _, base in places]
        return [self._multiply_add(zero, factor, base * BOTH) for factor, base in places]

    def _offset_of_bytes(self, zero: Value | None) -> list[Value]:
        """Codes without a sign are read as if theirs were turned over, 128 less."""
        away = self.type.shift - 128 * (self.type.element.dtype == dtypes.uint8)
        if zero is None and not away: return []
        number = self.kb.reg("f32")
        if zero is None: number.set(float(-away))
        else:
            self.kb.emit("cvt.rn.f32.u32", number, zero)
            number = float(-away) - number if away else -number
        made = self.kb.reg("b32")
        self.kb.emit(f"cvt.rn.{NAMES[self.dtype]}x2.f32", made, number, number)
        return [made]

    def _multiply_add(self, value: Value, factor: int, addend: int) -> Value:
        made = self.kb.reg("b32")
        self.kb.emit("mad.lo.u32", made, value, factor, addend)
        return made

    def constant(self, bits: int) -> Value:
        """A register of 32 bits, made once: where it is first asked for is to come before every loop."""
        if bits not in self.made: self.made[bits] = self.kb.reg("b32", bits)
        return self.made[bits]

    def prepare(self) -> None:
        """Makes the constants."""
        if looks_up(self.type): self._book()
        self.offsets(None)
        one = ONE[self.dtype]
        for bits in (one, one | 0x8000, self._power(), BASE[self.dtype], 0x8000, SIXTEENTH):
            self.constant(bits * BOTH)

    # **** operands ****

    def operand(self, words: Words, step: int, offsets: Sequence[Sequence[Value]]) -> list[Value]:
        """The registers of 16 columns. `offsets` of the lane's rows g and g + 8."""
        if self.integers and self.type.bits == 8: return self._bytes(words["codes"], step, offsets)
        if looks_up(self.type): return self._look_up(words["codes"][step])
        if not self.integers: return [self._place_sign(words, step, r) for r in range(4)]
        return [self._integer(words, step, r, offsets[r % 2]) for r in range(4)]

    def _field(self, words: Sequence[Value], bits: int, number: int) -> tuple[Value, int]:
        """The word of a field, and its first bit."""
        each = 16 // bits
        return words[number // each], bits * (number % each)

    def _shift_bits(self, word: Value, away: int) -> Value:
        """Bits, `away` places down (up, where it is negative)."""
        return word >> away if away > 0 else word << -away if away else word

    def _and_or(self, a: Value, mask: int, c: Value) -> Value:
        made = self.kb.reg("b32")
        self.kb.emit("lop3.b32", made, a, mask * BOTH, c, AND_OR)
        return made

    def _integer(self, words: Words, step: int, r: int, offsets: Sequence[Value]) -> Value:
        number, made = 4 * step + r, self.constant(BASE[self.dtype] * BOTH)
        up = 0
        large = self.sixteenths and r % 2 == 1
        for name, bits in self.planes.items():
            word, at = self._field(words[name], bits, number)
            place = up + 4 * large
            made = self._and_or(self._shift_bits(word, at - place), ((1 << bits) - 1) << place, made)
            up += bits
        if large: return self._fma(made, self.constant(SIXTEENTH * BOTH), offsets[1])
        return self._fma(made, self.constant(ONE[self.dtype] * BOTH), offsets[0])

    def _bytes(self, words: Sequence[Value], step: int, offsets: Sequence[Sequence[Value]]) -> list[Value]:
        made = []
        base = self.constant(BASE[self.dtype] * BOTH)
        for r in range(4):
            word, at = self._field(words, 8, 4 * step + r)
            if self.type.element.dtype == dtypes.uint8: word = word ^ 0x80808080
            moved = self._shift_bits(word, at)
            low, sign = self._and_or(moved, 0x7F, base), self._and_or(moved, 0x80, base)
            value = self._fma(sign, self.constant((ONE[self.dtype] | 0x8000) * BOTH), low)
            one = self.constant(ONE[self.dtype] * BOTH)
            made.append(self._fma(value, one, offsets[r % 2][0]) if offsets[r % 2] else value)
        return made

    def _fma(self, a: Value, b: Value, c: Value) -> Value:
        made = self.kb.reg("b32")
        self.kb.emit(f"fma.rn.{NAMES[self.dtype]}x2", made, a, b, c)
        return made

    # **** floats ****

    def _small(self) -> tuple[int, int]:
        """Bits of a code's mantissa, bias of its exponent."""
        return PLACED.get(self.type.element) or SMALL[self.type.element.dtype]

    def _power(self) -> int:
        """The bits of the power of two that a placed number is to be multiplied with."""
        if self.integers or looks_up(self.type): return ONE[self.dtype]
        return (2 * BIAS[self.dtype] - self._small()[1]) << MANTISSA[self.dtype]

    def _place_sign(self, words: Words, step: int, r: int) -> Value:
        """The sign is the upper bit of the last plane."""
        planes, up = list(self.planes.items()), MANTISSA[self.dtype] - self._small()[0]
        fields = [(*self._field(words[name], bits, 4 * step + r), bits) for name, bits in planes]
        word, at, bits = fields[-1]
        number = self._shift_bits(word, at + bits - 16) & 0x80008000
        for last, (word, at, bits) in enumerate(fields, 1 - len(fields)):
            mask = (1 << bits - (last == 0)) - 1
            number = self._and_or(self._shift_bits(word, at - up), mask << up, number)
            up += bits
        # plus −0: sm_80 has no multiplication of bfloat16 alone
        return self._fma(number, self.constant(self._power() * BOTH), self.constant(0x8000 * BOTH))

    # **** codebooks ****

    def _book(self) -> list[list[Value]]:
        """The lower bytes of entries, four a register, and the upper ones."""
        bits = [bits16(value, self.dtype) for value in self.type.element.values]
        book = [[each >> shift & 0xFF for each in bits] for shift in (0, 8)]
        return [[self.constant(int.from_bytes(bytes(half[i:i + 4]), "little")) for i in range(0, 16, 4)]
                for half in book]

    def _look_up(self, word: Value) -> list[Value]:
        """The pairs of a word's four fields: those of fields 0 and 1, of both halves, then of 2 and 3."""
        kb, made = self.kb, []
        pairs = self._prmt(word, word, 0x3120)
        entry, larger = pairs & 0x77777777, kb.reg("b32")
        # byte i of entries from 8 on is byte 4 + i of the two lookups
        kb.emit("lop3.b32", larger, pairs >> 1, 0x44444444, 0x32103210, AND_OR)
        for half in (0, 16):
            which, later = self._shift_bits(entry, half), self._shift_bits(larger, half)
            low, high = (self._prmt(self._prmt(a, b, which), self._prmt(c, d, which), later)
                         for a, b, c, d in self._book())
            made += [self._prmt(low, high, 0x6240), self._prmt(low, high, 0x7351)]
        return made

    def _prmt(self, a: Value, b: Value, which: Value | int) -> Value:
        made = self.kb.reg("b32")
        self.kb.emit("prmt.b32", made, a, b, which)
        return made
