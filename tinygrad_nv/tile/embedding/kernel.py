"""The rows of a table that tokens mean (spec.py), in PTX: for the kernels of a gradient."""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.embedding.spec import EmbeddingSpec

NO_ROW = 0xFFFFFFFF


def token_place(kb: Kernel, spec: EmbeddingSpec, tokens: Value, token: Value) -> Value:
    """Returns the address at which a token's number lies: u64."""
    size, rest = spec.tokens.dtype.itemsize, token
    at = tokens + spec.tokens.offset * size if spec.tokens.offset else tokens
    if len(spec.tokens.extents) == 1: return advance(kb, at, token, spec.tokens.strides[0] * size)
    for extent, stride in reversed(list(zip(spec.tokens.extents, spec.tokens.strides, strict=True))):
        at = advance(kb, at, rest % extent, stride * size)
        rest = rest // extent
    return at


def load_row_index(kb: Kernel, spec: EmbeddingSpec, at: Value, there: Value | None = None) -> Value:
    """The row that the number at `at` means, u32; beyond all rows where it is of none, or not `there`."""
    wide = spec.tokens.dtype.itemsize == 8
    kind = "s64" if wide else "s32"
    number, row = kb.reg(kind, -1 - spec.rows), kb.reg("u32")
    kb.emit(f"ld.global.{kind}", number, at.at(), guard=there)
    kb.emit(f"add.{kind}", number, number, spec.rows, guard=number < 0)
    if not wide:
        kb.emit("mov.b32", row, number)     # below 0: at least 1 << 31
        return row
    bits, known = kb.reg("u64"), kb.reg("pred")
    kb.emit("mov.b64", bits, number)
    kb.emit("setp.lt.u64", known, bits, spec.rows)
    return kb.select(known, bits.to("u32"), NO_ROW, "u32")
