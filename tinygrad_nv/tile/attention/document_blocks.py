"""Tokens that those of a block may see, or be seen by: those of their documents (documents.py).

Protocol: `Documents` reads the bounds of a block of tokens, two numbers, from the score's parameters; so it
is made after the grids before have ended. What is outside of `begin` … `end` − 1 needs no block of its own;
what a block hides beside is the score's business.

Rows of a ragged batch's result that belong to no sequence, since they come after the last, are zeros. The
grid has one more element along the batch than there are sequences, whose CTAs `clear` what is left.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.attention.documents import bounds
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.expression import Load

STORES = {2: ("b16", 1), 4: ("b32", 1), 8: ("v2.b32", 2), 16: ("v4.b32", 4)}  # of so many bytes


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


def clear(kb: Kernel, spec: AttentionSpec, out: Value, cu_q: Value, batch: Sequence[Value], block: Value,
          block_m: int) -> None:
    """Ends CTAs whose `batch` (u32) is no sequence; they write what is left, `block_m` rows at a time, each
    its own head. `block` (u32) numbers those of a head."""
    assert spec.total is not None
    size, rows = spec.out.dtype.itemsize, spec.out
    nbytes = spec.d_v * size
    width = min(rows.alignment_bytes, nbytes & -nbytes)
    kind, count = STORES[width]
    with kb.if_(batch[0] == spec.batch[0]), kb.comment("rows after the last sequence"):
        begin = kb.reg("u32")
        kb.emit("ld.global.u32", begin, cu_q.at(4 * spec.batch[0]))
        base = out + rows.offset * size
        for index, stride in zip(batch[1:], rows.batch[1:], strict=True):
            base = advance(kb, base, index, stride * size)
        with kb.loop(begin + block * block_m, spec.total[0], kb.nctaid.x * block_m) as first, \
             kb.loop(kb.tid.x, block_m * (nbytes // width), kb.threads[0]) as i:
            row = first + i // (nbytes // width)
            at = advance(kb, advance(kb, base, row, rows.row * size), i % (nbytes // width), width)
            kb.emit(f"st.global.{kind}", at.at(), [0] * count if count > 1 else 0, guard=row < spec.total[0])
        kb.emit("exit")


def store_logs(kb: Kernel, spec: AttentionSpec, pointer: Value, logs: Sequence[Value], batch: Sequence[Value],
               row: Value, rows: Value) -> None:
    """l of every row lane / 4 + 8 i, from the first of the four lanes that have it."""
    _, heads, group = spec.batch
    matrix = (batch[0] * heads + batch[1]) * group + batch[2]
    lane = kb.special("laneid")
    own = row + (lane >> 2)
    at = pointer + (matrix.to("u64") * spec.s_q + own.to("u64")) * 4
    mine = (lane & 3) == 0
    for i, log in enumerate(logs):
        kb.emit("st.global.f32", at.at(32 * i), log, guard=mine & (own + 8 * i < rows))
