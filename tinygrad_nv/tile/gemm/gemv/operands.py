"""Chunks of weights and activations in registers: loads in pieces, and the numbers in them.

Protocol: a chunk is loaded as pieces of `width` bytes and read as words of 32 bits, the elements in the
order of the pieces. Loads of two bytes and of one stay in registers of their own until the words are asked
for, so that a load in flight is not waited for.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.gemm.spec import FP8

HIGH_HALF = 0xFFFF0000
VECTORS = {16: ".v4.b32", 8: ".v2.b32", 4: ".b32", 2: ".b16", 1: ".u8"}


def registers(kb: Kernel, nbytes: int, width: int) -> list[Value]:
    """Returns the registers that a chunk of `nbytes` is loaded into."""
    if width >= 4: return kb.regs("b32", nbytes // 4)
    return kb.regs("b16" if width == 2 else "u32", nbytes // width)


def load(kb: Kernel, opcode: str, into: Sequence[Value], piece: int, width: int, *operands: object,
         guard: Value | None = None) -> None:
    """Loads piece number `piece` of a chunk; `operands` are the place and what follows it."""
    count = max(width // 4, 1)
    some = list(into[piece * count:(piece + 1) * count])
    kb.emit(opcode + VECTORS[width], some if count > 1 else some[0], *operands, guard=guard)


def words(kb: Kernel, loaded: Sequence[Value], width: int) -> list[Value]:
    """The chunk's words."""
    if width >= 4: return list(loaded)
    if width == 2:
        made = []
        for low in range(0, len(loaded), 2):
            word = kb.reg("b32")
            kb.emit("mov.b32", word, list(loaded[low:low + 2]))
            made.append(word)
        return made
    pairs = [permute(kb, loaded[i], loaded[i + 1], 0x0040) for i in range(0, len(loaded), 2)]
    return [permute(kb, pairs[i], pairs[i + 1], 0x5410) for i in range(0, len(pairs), 2)]


def permute(kb: Kernel, a: Value, b: Value | int, selector: int) -> Value:
    """prmt: bytes 0 to 3 are those of a, 4 to 7 those of b; 8 added spreads the sign of one."""
    made = kb.reg("b32")
    kb.emit("prmt.b32", made, a, b, selector)
    return made


# **** numbers ****

def spread(kb: Kernel, some: Sequence[Value], dtype: DType) -> list[Value]:
    """Words of fp8 as twice as many of float16, which holds each exactly; others as they are."""
    return [half for word in some for half in _halves(kb, word, dtype)] if dtype in FP8 else list(some)


def _halves(kb: Kernel, word: Value, dtype: DType) -> list[Value]:
    """Four fp8 numbers as two words of float16."""
    if kb.arch < "sm_89": return [_widen(kb, permute(kb, word, 0, at), dtype) for at in (0x1404, 0x3424)]
    name, made = "e4m3x2" if dtype == dtypes.fp8e4m3 else "e5m2x2", kb.regs("b32", 2)
    parts = kb.regs("b16", 2)
    kb.emit("mov.b32", parts, word)
    for half, part in zip(made, parts, strict=True): kb.emit(f"cvt.rn.f16x2.{name}", half, part)
    return made


def _widen(kb: Kernel, high: Value, dtype: DType) -> Value:
    """Two fp8 numbers in the high bytes of two halves, as float16: e5m2 is one already, e4m3 has a bit less
    of exponent, a bias less by 8, and a NaN where 480 would be."""
    if dtype == dtypes.fp8e5m2: return high
    magnitude = (high & 0x7F007F00) >> 1
    nan = (magnitude + 0x00800080) & 0x40004000
    made = kb.reg("b32")
    kb.emit("mul.f16x2", made, magnitude | (high & 0x80008000), kb.reg("b32", 0x5C005C00))
    return made | nan | (nan >> 1)


def floats(kb: Kernel, word: Value, dtype: DType) -> list[Value]:
    """The numbers of a word of `spread` as float32 bits: fma takes registers of bits."""
    if dtype == dtypes.float32: return [word]
    if dtype == dtypes.bfloat16: return [word << 16, word & HIGH_HALF]
    halves, made = kb.regs("b16", 2), kb.regs("f32", 2)
    kb.emit("mov.b32", halves, word)
    for wide, half in zip(made, halves, strict=True): kb.emit("cvt.f32.f16", wide, half)
    return made


def integers(kb: Kernel, word: Value, dtype: DType) -> list[Value]:
    """Four bytes as s32, each one prmt."""
    selectors = [(0x8880 + 0x1111 * i) if dtype == dtypes.int8 else 0x4440 + i for i in range(4)]
    return [permute(kb, word, 0, selector) for selector in selectors]


def numbers(kb: Kernel, some: Sequence[Value], dtype: DType) -> list[Value]:
    """All numbers of words of `spread`."""
    each = integers if dtypes.is_int(dtype) else floats
    return [number for word in some for number in each(kb, word, dtype)]
