"""Vectors of 16 bytes as sums: four words in memory's form, elements in float32 or as integers between."""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.tile.lanes import FLOAT16S, pack, unpack

WORDS = 4
Words = list[Value]


def load(kb: Kernel, place: MemoryOperand, guard: Value | None = None) -> Words:
    """A vector; undefined where the guard does not hold."""
    made = kb.regs("b32", WORDS)
    kb.emit("ld.global.v4.b32", made, place, guard=guard)
    return made


def store(kb: Kernel, place: MemoryOperand, words: Words, guard: Value | None = None) -> None:
    """A vector."""
    kb.emit("st.global.v4.b32", place, words, guard=guard)


def load_reduce(kb: Kernel, place: Value, dtype: DType) -> Words:
    """The sum of the vectors at an address of a multicast object, made by the switch."""
    made = kb.regs("b32", WORDS)
    if dtype in FLOAT16S:
        kb.emit(f"multimem.ld_reduce.weak.global.add.acc::f32.v4.{FLOAT16S[dtype]}x2", made, place.at())
    elif dtype == dtypes.float32: kb.emit("multimem.ld_reduce.weak.global.add.v4.f32", made, place.at())
    elif dtype.itemsize == 4:
        for i, word in enumerate(made):
            kb.emit("multimem.ld_reduce.weak.global.add.u32", word, place.at(4 * i))
    else:
        for i in range(0, WORDS, 2):
            pair = kb.reg("u64")
            kb.emit("multimem.ld_reduce.weak.global.add.u64", pair, place.at(4 * i))
            kb.emit("mov.b64", made[i:i + 2], pair)
    return made


def elements(kb: Kernel, words: Words, dtype: DType) -> list[Value]:
    """Returns the elements of a vector: float32, or integers of the dtype's width."""
    if dtype in FLOAT16S: return [each for word in words for each in unpack(kb, word, dtype)]
    if dtype.itemsize == 4: return [move_bits(kb, word, _kind(dtype)) for word in words]
    made = kb.regs("u64", WORDS // 2)
    for i, each in enumerate(made): kb.emit("mov.b64", each, words[2 * i:2 * i + 2])
    return made


def vector(kb: Kernel, values: Sequence[Value], dtype: DType) -> Words:
    """Elements as words, rounded once."""
    if dtype in FLOAT16S: return [pack(kb, values[i:i + 2], dtype) for i in range(0, len(values), 2)]
    if dtype.itemsize == 4: return [move_bits(kb, value, "b32") for value in values]
    made = kb.regs("b32", WORDS)
    for i, each in enumerate(values): kb.emit("mov.b64", made[2 * i:2 * i + 2], each)
    return made


def add_vectors(sums: Sequence[Value], more: Sequence[Value]) -> list[Value]:
    """Element by element."""
    return [a + b for a, b in zip(sums, more, strict=True)]


def move_bits(kb: Kernel, value: Value, kind: str) -> Value:
    """The same bits in a register of another kind."""
    made = kb.reg(kind)
    kb.emit("mov.b32", made, value)
    return made


def _kind(dtype: DType) -> str: return "f32" if dtype == dtypes.float32 else "u32"


def copy_elements(kb: Kernel, target: Value, source: Value, count: int, dtype: DType) -> None:
    """The first elements of a vector, one by one."""
    kind = f"b{8 * dtype.itemsize}"
    for i in range(count):
        one = kb.reg(kind)
        kb.emit(f"ld.global.{kind}", one, source.at(i * dtype.itemsize))
        kb.emit(f"st.global.{kind}", target.at(i * dtype.itemsize), one)


def store_elements(kb: Kernel, target: Value, words: Words, count: int, dtype: DType) -> None:
    """The first elements of a vector in registers."""
    for i in range(count):
        place = target.at(i * dtype.itemsize)
        if dtype.itemsize == 8: kb.emit("st.global.v2.b32", place, words[2 * i:2 * i + 2])
        elif dtype.itemsize == 4: kb.emit("st.global.b32", place, words[i])
        else:
            halves = kb.regs("b16", 2)
            kb.emit("mov.b32", halves, words[i // 2])
            kb.emit("st.global.b16", place, halves[i % 2])
