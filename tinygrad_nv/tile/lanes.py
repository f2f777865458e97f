"""Values of an epilogue in registers: an element, or two that are neighbours in a row.

Protocol: a `Lanes` holds what one node is worth in one or two elements, in the forms that have been asked
for so far. Wide: a register for each element (one for both where they are equal, or a Python number), f32 for
floats, s32 or u32 for integers (of 8 or 16 bits: extended by their sign), a predicate for booleans. Packed:
both elements of a 16-bit float dtype in one b32, the first in its lower half. Halves: a 16-bit float in a b16
for each element, as they are loaded: what converts them waits for memory. Converting costs instructions, so
nothing is converted that is not asked for. A value in either form is exactly a value of its dtype.
"""
from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.expression import nearest

FLOAT16S = {dtypes.bfloat16: "bf16", dtypes.float16: "f16"}
FP8 = {dtypes.fp8e4m3: "e4m3x2", dtypes.fp8e5m2: "e5m2x2"}
NARROW = {dtypes.int8: ("bfe.s32", 8), dtypes.uint8: ("bfe.u32", 8), dtypes.int16: ("bfe.s32", 16),
          dtypes.uint16: ("bfe.u32", 16)}
SUPPORTED = (dtypes.float32, *FLOAT16S, *FP8, dtypes.int32, dtypes.uint32, *NARROW, dtypes.bool)
Number = Value | int | float


def kind_of(dtype: DType) -> str:
    """The register of a wide value."""
    if dtype == dtypes.bool: return "pred"
    if dtypes.is_float(dtype): return "f32"
    return "u32" if dtype == dtypes.uint32 else "s32"


@dataclass
class Lanes:
    """A node's value. At least one of the forms is there."""
    kb: Kernel
    dtype: DType
    wide: list[Number] = field(default_factory=list)
    packed: Value | None = None
    halves: list[Value] = field(default_factory=list)

    @property
    def several(self) -> bool:
        """Whether it has a form with a value for each of two elements."""
        return self.packed is not None or len(self.wide) > 1 or len(self.halves) > 1

    def each(self) -> list[Number]:
        """The wide form: one value where both elements have the same, else two."""
        if not self.wide and self.packed is None:
            self.wide = [widen_half(self.kb, half, self.dtype) for half in self.halves]
        if not self.wide:
            assert self.packed is not None
            self.wide = list(unpack(self.kb, self.packed, self.dtype))
        return self.wide

    def at(self, i: int) -> Number:
        """The wide value of element `i`."""
        each = self.each()
        return each[i if len(each) > 1 else 0]

    def register(self, i: int = 0) -> Value:
        """The same, in a register."""
        value = self.at(i)
        return value if isinstance(value, Value) else self.kb.reg(kind_of(self.dtype), value)

    def pair(self) -> Value:
        """The packed form."""
        if self.packed is None and self.halves:
            self.packed = self.kb.reg("b32")
            self.kb.emit("mov.b32", self.packed, [self.halves[0], self.halves[-1]])
        if self.packed is None: self.packed = pack(self.kb, self.wide, self.dtype)
        return self.packed

    def half(self, i: int) -> Value:
        """Element `i` of a 16-bit float, as b16."""
        if not self.halves and self.packed is not None:
            self.halves = self.kb.regs("b16", 2)
            self.kb.emit("mov.b32", self.halves, self.packed)
        if self.halves: return self.halves[i if len(self.halves) > 1 else 0]
        made = self.kb.reg("b16")
        self.kb.emit(f"cvt.rn.{FLOAT16S[self.dtype]}.f32", made, self.at(i))
        return made


def pack(kb: Kernel, wide: Sequence[Number], dtype: DType) -> Value:
    """One or two floats, rounded to a 16-bit dtype, in a b32."""
    made = kb.reg("b32")
    if all(not isinstance(value, Value) for value in wide):
        low, high = (bits16(float(value), dtype) for value in (wide[0], wide[-1]))  # type: ignore[arg-type]
        return made.set(high << 16 | low)
    kb.emit(f"cvt.rn.{FLOAT16S[dtype]}x2.f32", made, wide[-1], wide[0])
    return made


def bits16(value: float, dtype: DType) -> int:
    """The bits of a number rounded to a 16-bit float."""
    exact = nearest(value, dtype)
    if dtype == dtypes.float16: return int.from_bytes(struct.pack("<e", exact), "little")
    return int.from_bytes(struct.pack("<f", exact), "little") >> 16


def unpack(kb: Kernel, pair: Value, dtype: DType) -> tuple[Value, Value]:
    """Both halves of a b32, as f32."""
    low, high = kb.reg("f32"), kb.reg("f32")
    if dtype == dtypes.bfloat16:  # a bf16 is the upper half of a float
        kb.emit("shl.b32", low, pair, 16)
        kb.emit("and.b32", high, pair, 0xFFFF0000)
        return low, high
    halves = kb.regs("b16", 2)
    kb.emit("mov.b32", halves, pair)
    for made, half in zip((low, high), halves, strict=True): kb.emit("cvt.f32.f16", made, half)
    return low, high


def widen_half(kb: Kernel, half: Value, dtype: DType) -> Value:
    """A 16-bit float in a b16 as f32."""
    made = kb.reg("f32")
    kb.emit(f"cvt.f32.{FLOAT16S[dtype]}", made, half)
    return made


def round_floats(kb: Kernel, wide: list[Number], dtype: DType) -> Lanes:
    """Floats as float32 computed them, rounded to `dtype`."""
    if dtype in FLOAT16S: return Lanes(kb, dtype, [], pack(kb, wide, dtype)) if len(wide) > 1 else \
        Lanes(kb, dtype, [_round_one(kb, wide[0], dtype)])
    if dtype in FP8: return Lanes(kb, dtype, from_fp8(kb, to_fp8(kb, wide, dtype), dtype)[:len(wide)])
    return Lanes(kb, dtype, wide)


def _round_one(kb: Kernel, value: Number, dtype: DType) -> Number:
    if not isinstance(value, Value): return nearest(value, dtype)
    half = kb.reg("b16")
    kb.emit(f"cvt.rn.{FLOAT16S[dtype]}.f32", half, value)
    return widen_half(kb, half, dtype)


def to_fp8(kb: Kernel, wide: Sequence[Number], dtype: DType) -> Value:
    """One or two floats as bytes of a b16, what is too large as the largest finite number."""
    made = kb.reg("b16")
    kb.emit(f"cvt.rn.satfinite.{FP8[dtype]}.f32", made, wide[-1], wide[0])
    return made


def from_fp8(kb: Kernel, pair: Value, dtype: DType) -> list[Number]:
    """Both bytes of a b16, as f32."""
    halves = kb.reg("b32")
    kb.emit(f"cvt.rn.f16x2.{FP8[dtype]}", halves, pair)
    return list(unpack(kb, halves, dtypes.float16))


def wrap(kb: Kernel, value: Number, dtype: DType) -> Number:
    """An integer cut to the width of a dtype of 8 or 16 bits."""
    if dtype not in NARROW: return value
    opcode, width = NARROW[dtype]
    if not isinstance(value, Value):
        value &= (1 << width) - 1  # type: ignore[operator]
        return value - (value >> width - 1 << width) * (opcode == "bfe.s32")
    made = kb.reg("s32")
    kb.emit(opcode, made, value, 0, width)
    return made


def convert(value: Lanes, target: DType) -> Lanes:
    """A value cast to another dtype. Floats become integers towards zero; booleans are what is not 0."""
    kb, source = value.kb, value.dtype
    if source == target: return value
    if target == dtypes.bool: return Lanes(kb, target, [_not_zero(kb, each, source) for each in value.each()])
    if dtypes.is_float(target):
        wide = [_as_float(kb, each, source) for each in value.each()]
        return Lanes(kb, target, wide) if exact(source, target) else round_floats(kb, wide, target)
    return Lanes(kb, target, [wrap(kb, _as_integer(kb, each, source, target), target)
                             for each in value.each()])


def exact(source: DType, target: DType) -> bool:
    """Whether every value of `source` is one of the float dtype `target`."""
    if target == dtypes.float32 or source == dtypes.bool: return True
    if source == dtypes.fp8e5m2 and target in FLOAT16S: return True
    if source == dtypes.fp8e4m3 and target in FLOAT16S: return True
    return source in (dtypes.int8, dtypes.uint8) and target in FLOAT16S  # 8 bits of mantissa hold them


def _not_zero(kb: Kernel, value: Number, source: DType) -> Number:
    if not isinstance(value, Value): return kb.reg("pred", int(value != 0))
    made, kind = kb.reg("pred"), kind_of(source)
    kb.emit("setp.neu.f32" if kind == "f32" else f"setp.ne.{kind}", made, value, 0.0 if kind == "f32" else 0)
    return made


def _as_float(kb: Kernel, value: Number, source: DType) -> Number:
    if not isinstance(value, Value): return nearest(float(value), dtypes.float32)
    if dtypes.is_float(source): return value
    if source == dtypes.bool: return kb.select(value, 1.0, 0.0, "f32")
    made = kb.reg("f32")
    kb.emit(f"cvt.rn.f32.{kind_of(source)}", made, value)
    return made


def _as_integer(kb: Kernel, value: Number, source: DType, target: DType) -> Number:
    if not isinstance(value, Value): return int(value)
    kind = kind_of(target)
    if source == dtypes.bool: return kb.select(value, 1, 0, kind)
    made = kb.reg(kind)
    if dtypes.is_float(source): kb.emit(f"cvt.rzi.{kind}.f32", made, value)
    else: kb.emit("mov.b32", made, value)
    return made


def count_lanes(kb: Kernel, predicate: Value) -> Value:
    """In how many lanes of the warp a predicate holds, u32."""
    votes, count = kb.reg("b32"), kb.reg("u32")
    kb.emit("vote.sync.ballot.b32", votes, predicate, -1)
    kb.emit("popc.b32", count, votes)
    return count


def across(kb: Kernel, value: Value, opcode: str, lanes: int = 32) -> Value:
    """An operation over so many lanes, a power of two, in all of them: the same bits in each, as it does not
    matter which of two operands comes first."""
    while lanes > 1:
        lanes //= 2
        other, made = kb.regs(value.kind, 2)
        kb.emit("shfl.sync.bfly.b32", other, value, lanes, 31, -1)
        kb.emit(opcode, made, value, other)
        value = made
    return value
