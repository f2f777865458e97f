"""Operations over the lanes of a warp."""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Value


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
