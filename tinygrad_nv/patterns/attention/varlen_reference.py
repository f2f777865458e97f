"""Ragged attention in plain tinygrad: the body of varlen.py's function.

Protocol: every sequence is filled up to the most rows and keys, with zeros; what is filled up is hidden, and
rows are put back where they came from. So nothing of a sequence is ever multiplied by another's.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor, dtypes

from tinygrad_nv.tile.attention.spec import Band


@dataclass(frozen=True)
class VarlenAttention:
    """A ragged attention, as far as its tensors do not say it."""
    most_q: int
    most_k: int
    band: Band
    scale: float
    softcap: float | None = None
    sinks: bool = False


def attend_varlen(what: VarlenAttention, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor,
             *more: Tensor) -> tuple[Tensor, ...]:
    """The attention in plain tinygrad: every sequence filled up to the most, softmax in float32; and l,
    float32 [H, rows], the logarithm of the sum by which a row's weights are divided. `more` are sinks and
    distances, those there are."""
    sinks, distances = more[:what.sinks], next(iter(more[what.sinks:]), None)
    (total, heads, d), kv_heads, batch = q.shape, k.shape[1], cu_q.shape[0] - 1
    rows, keys = (lengths(cu, most) for cu, most in ((cu_q, what.most_q), (cu_k, what.most_k)))
    queries = pad_sequences(q, cu_q, rows, what.most_q).reshape(batch, what.most_q, kv_heads,
                                                                heads // kv_heads, d)
    k, v = (pad_sequences(x, cu_k, keys, what.most_k).permute(0, 2, 1, 3).unsqueeze(2) for x in (k, v))
    s = (queries.permute(0, 2, 3, 1, 4).float() @ k.float().transpose(-1, -2)) * what.scale
    if what.softcap is not None: s = (s / what.softcap).tanh() * what.softcap
    if distances is not None:
        way = Tensor.arange(what.most_k).reshape(1, -1) - Tensor.arange(what.most_q).reshape(-1, 1)
        added = distances[:, way + distances.shape[1] // 2]
        s = s + added.reshape(1, kv_heads, heads // kv_heads, *way.shape)
    s = visible_keys(what, rows, keys).reshape(batch, 1, 1, what.most_q, what.most_k).where(s, -float("inf"))
    logits = [each.reshape(1, kv_heads, heads // kv_heads, 1, 1) for each in sinks]
    top = s.max(-1, keepdim=True)
    for each in logits: top = top.maximum(each)
    top = (top == -float("inf")).where(0, top).detach()
    e = (s - top).exp()
    sum_ = e.sum(-1, keepdim=True)
    for each in logits: sum_ = sum_ + (each - top).exp()
    p = e / sum_.eq(0).where(1, sum_)
    out = (p.cast(v.dtype).float() @ v.float()).cast(v.dtype).permute(0, 3, 1, 2, 4)
    logs = (top + sum_.log()).permute(0, 3, 1, 2, 4).reshape(batch * what.most_q, heads, 1)
    logs = scatter_rows(logs, cu_q, what.most_q, total).squeeze(-1).transpose(0, 1)
    return scatter_rows(out.reshape(batch * what.most_q, heads, v.shape[-1]), cu_q, what.most_q, total), logs


def lengths(cu: Tensor, most: int) -> Tensor:
    """Rows of each sequence, [sequences]."""
    return (cu[1:] - cu[:-1]).clip(0, most)


def pad_sequences(x: Tensor, cu: Tensor, length: Tensor, most: int) -> Tensor:
    """Each sequence's rows, then zeros: [sequences, most, …]."""
    row = Tensor.arange(most)
    at = (cu[:-1].reshape(-1, 1) + row).clip(0, x.shape[0] - 1)
    return (row < length.reshape(-1, 1)).reshape(*at.shape, 1, 1).where(x[at], 0)


def token_bounds(cu: Tensor, most: int, total: int) -> tuple[Tensor, Tensor]:
    """Returns where the sequence of each row begins and ends, its `most` rows, int32 [1, rows]; rows of no
    sequence have their own index as both."""
    row, last = Tensor.arange(total, dtype=dtypes.int32), cu.shape[0] - 2
    number = (row.reshape(-1, 1) >= cu[1:].reshape(1, -1)).sum(-1)
    begin = cu[number.minimum(last)]
    end = cu[1:][number.minimum(last)].minimum(begin + most)
    inside = (number <= last) & (begin <= row) & (row < end)
    return inside.where(begin, row).reshape(1, -1), inside.where(end, row).reshape(1, -1)


def visible_keys(what: VarlenAttention, rows: Tensor, keys: Tensor) -> Tensor:
    """Returns which columns each row of a sequence sees: [sequences, most_q, most_k]."""
    place = Tensor.arange(what.most_q).reshape(1, -1, 1) + (keys - rows).reshape(-1, 1, 1)
    column = Tensor.arange(what.most_k).reshape(1, 1, -1)
    made = (column < keys.reshape(-1, 1, 1)) & (place >= place)
    if what.band.first is not None: made = made & (column >= place + what.band.first)
    if what.band.last is not None: made = made & (column <= place + what.band.last)
    return made


def scatter_rows(x: Tensor, cu: Tensor, most: int, total: int) -> Tensor:
    """Rows of [sequences · most, …] where they belong: [total, …], zeros where they are none's."""
    row, last = Tensor.arange(total), cu.shape[0] - 2
    sequence = (row.reshape(-1, 1) >= cu[1:].reshape(1, -1)).sum(-1)
    own = row - cu[sequence.minimum(last)]
    inside = (sequence <= last) & (own >= 0) & (own < most)
    at = (sequence.minimum(last) * most + own.clip(0, most - 1))
    return inside.reshape(-1, 1, 1).where(x[at], 0)
