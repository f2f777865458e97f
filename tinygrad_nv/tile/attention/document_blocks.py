"""Tokens that those of a block may see, or be seen by: those of their documents (documents.py).

Protocol: `Documents` reads the bounds of a block of tokens, two numbers, from the score's parameters; so it
is made after the grids before have ended. What is outside of `begin` … `end` − 1 needs no block of its own;
what a block hides beside is the score's business.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.attention.documents import bounds
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.expression import Load


@dataclass(frozen=True)
class Documents:
    """Begin and end (s32) of the documents of a block of tokens: begin < end."""
    begin: Value
    end: Value

    @staticmethod
    def of(kb: Kernel, spec: AttentionSpec, extras: Sequence[Value], batch: Sequence[Value], first: Value,
           count: int) -> Documents | None:
        """Returns the documents of `count` tokens from `first` (u32) on, of an element of the batch (u32);
        None where the spec has no documents. `extras` are the score's parameters."""
        if not spec.documents: return None
        low, high = bounds(spec)
        last, end = kb.reg("u32"), kb.reg("s32")
        kb.emit("min.u32", last, first + (count - 1), spec.s_q - 1)
        begin = _read(kb, low, extras, batch, first)
        # of tokens of no document both are the token
        kb.emit("max.s32", end, _read(kb, high, extras, batch, last), begin + 1)
        return Documents(begin, end)


def _read(kb: Kernel, load: Load, extras: Sequence[Value], batch: Sequence[Value], token: Value) -> Value:
    at = advance(kb, extras[load.parameter] + load.offset * 4, token, 4)
    for index, stride in zip(batch[:2], (load.batch or (0, 0, 0))[:2], strict=True):
        if stride: at = advance(kb, at, index, stride * 4)
    made = kb.reg("s32")
    kb.emit("ld.global.s32", made, at.at())
    return made
