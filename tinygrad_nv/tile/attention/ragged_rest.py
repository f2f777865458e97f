"""Rows of a ragged batch's result that belong to no sequence, since they come after the last: zeros.

Protocol: the grid has one more element along the batch than there are sequences. Its CTAs write what is left,
`block_m` rows at a time, each its own head, and end.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.attention.spec import AttentionSpec

STORES = {2: ("b16", 1), 4: ("b32", 1), 8: ("v2.b32", 2), 16: ("v4.b32", 4)}  # of so many bytes


def clear(kb: Kernel, spec: AttentionSpec, out: Value, cu_q: Value, batch: Sequence[Value], block: Value,
          block_m: int) -> None:
    """Ends CTAs whose `batch` (u32) is no sequence; `block` (u32) numbers those of a head."""
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
