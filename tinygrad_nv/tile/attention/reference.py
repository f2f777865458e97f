"""An attention and its gradients in plain tinygrad (tile/reference.py).

Protocol: every sequence of a ragged batch is filled up to the most rows and keys with zeros, which are
hidden, and its rows are put back where they belong. l of rows that a sequence lacks is NaN. The derivative of
a score is tinygrad's gradient of it.
"""
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.dropout import keeps
from tinygrad_nv.tile.attention.spec import KEEP_ALL, AttentionSpec, Rows
from tinygrad_nv.tile.reference import (
    Argument,
    Given,
    Place,
    Role,
    axes,
    compute_dtype,
    dense,
    elements,
    evaluate,
    gather,
    index_of,
    parameters,
    round_to,
)

LIFT = 256.0    # of p of 8 bits before it is rounded (spec.py)


def arguments(spec: AttentionSpec | BackwardSpec) -> tuple[Argument, ...]:
    """Returns the arguments as tile/kernel.py says: out, l, q, k, v, scales, cu_q, cu_k, sinks, seed, x0, x1,
    …; or dq, dk, dv, q, k, v, grad, l, delta, seed, x0, x1, …"""
    if isinstance(spec, BackwardSpec): return _backward_arguments(spec)
    s_q, s_kv = spec.total or (spec.s_q, spec.s_kv)
    made = [_rows(spec, "out", spec.out, s_q, spec.d_v, "out")]
    if spec.lse: made.append(Argument("l", dtypes.float32, (dense(*spec.batch, spec.s_q),), "out"))
    made += _operands(spec)
    for name, one, count in zip("qkv", spec.scales or (), (s_q, s_kv, s_kv), strict=False):
        blocks = Place(one.offset, (*spec.batch, -(-count // one.rows)), (*one.batch, one.block))
        made.append(Argument(f"scale_{name}", dtypes.float32, (blocks,)))
    if spec.is_ragged:
        ends = dense(spec.batch[0] + 1)
        made += [Argument(f"cu_{name}", dtypes.int32, (ends,), values=range(total + 1),
                          usual=range(0, total + 1, max(1, min(most, total // spec.batch[0]))))
                 for name, total, most in (("q", s_q, spec.s_q), ("k", s_kv, spec.s_kv))]
    if spec.sinks is not None: made.append(Argument("sinks", dtypes.float32, (_sinks(spec),)))
    return *made, *_rest(spec)


def _sinks(spec: AttentionSpec) -> Place: return Place(0, spec.batch, spec.sinks or (0, 0, 0))


def _backward_arguments(spec: BackwardSpec) -> tuple[Argument, ...]:
    one = spec.forward
    dq = Argument("dq", dtypes.float32, (dense(*one.batch, one.s_q, one.d),), "out")
    of_keys = [_rows(one, name, rows, one.s_kv, d, "out")
               for name, rows, d in (("dk", spec.dk, one.d), ("dv", spec.dv, one.d_v))]
    of_rows = [Argument(name, dtypes.float32, (dense(*one.batch, one.s_q),)) for name in ("l", "delta")]
    return (dq, *of_keys, *_operands(one), _rows(one, "grad", spec.grad, one.s_q, one.d_v), *of_rows,
            *_rest(one))


def _rows(spec: AttentionSpec, name: str, rows: Rows, count: int, d: int, role: Role = "in") -> Argument:
    place = _place(spec, rows, count, d, name in ("k", "v", "dk", "dv"))
    if spec.is_ragged: place = replace(place, extents=(1, *place.extents[1:]))
    return Argument(name, rows.dtype, (place,), role)


def _operands(spec: AttentionSpec) -> list[Argument]:
    s_q, s_kv = spec.total or (spec.s_q, spec.s_kv)
    return [_rows(spec, "q", spec.q, s_q, spec.d), _rows(spec, "k", spec.k, s_kv, spec.d),
            _rows(spec, "v", spec.v, s_kv, spec.d_v)]


def _rest(spec: AttentionSpec) -> list[Argument]:
    seed = [Argument("seed", dtypes.uint32, (dense(2),))] if spec.kept < KEEP_ALL else []
    return [*seed, *parameters((*spec.batch, spec.s_q, spec.s_kv), spec.score)]


# **** the passes ****

def reference(spec: AttentionSpec | BackwardSpec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """out and l; of a backward pass dq, dk and dv."""
    if isinstance(spec, BackwardSpec): return _gradients(spec, given, exact)
    s, seen, _ = _scores(spec, given, exact)
    top, sinks = s.max(-1, keepdim=True), None
    if spec.sinks is not None:
        sinks = gather(given["sinks"], _sinks(spec)).reshape(*spec.batch, 1, 1).cast(s.dtype)
        top = top.maximum(sinks)
    base = (top == -math.inf).where(0, top)
    e = (s - base).exp().contiguous()
    total = e.sum(-1, keepdim=True)
    if sinks is not None: total = total + (sinks - base).exp()
    kept = e * _keep(spec, given, s.shape) if spec.kept < KEEP_ALL else e
    if spec.scales is not None: p = _round(kept * LIFT, dtypes.fp8e4m3, exact) / LIFT
    else: p = _round(kept, spec.v.dtype, exact)
    out = p @ _operand(spec, given, "v", exact) / (total == 0).where(1, total)
    out = out.cast(compute_dtype(spec.out.dtype, exact)).contiguous()
    if spec.is_ragged: out = _lay_out(spec, given["cu_q"], out)
    l = (top + total.log()).squeeze(-1)
    if spec.is_ragged: l = seen[..., 1].where(l, math.nan)
    return (out, l) if spec.lse else (out,)


def _gradients(spec: BackwardSpec, given: Given, exact: bool) -> tuple[Tensor, ...]:
    one = spec.forward
    s, _, slope = _scores(one, given, exact)
    q, k, v = (_operand(one, given, name, exact) for name in "qkv")
    grad = gather(given["grad"], _place(one, spec.grad, one.s_q, one.d_v)).cast(q.dtype).contiguous()
    l, delta = (gather(given[name], dense(*one.batch, one.s_q, 1)).cast(q.dtype) for name in ("l", "delta"))
    p = (s == -math.inf).where(0, (s - (l == -math.inf).where(0, l)).exp()).contiguous()
    dp, kept = grad @ v.transpose(-1, -2), p
    if one.kept < KEEP_ALL:
        keep = _keep(one, given, s.shape)
        dp, kept = dp * keep, p * keep
    ds = (p == 0).where(0, p * (dp - delta) * slope)
    ds, kept = (_round(x, dtype, exact).contiguous()
                for x, dtype in ((ds, one.q.dtype), (kept, one.v.dtype)))
    dk, dv = ((x.transpose(-1, -2) @ y).sum(2, keepdim=True) for x, y in ((ds, q), (kept, grad)))
    return (ds @ k, *(x.cast(compute_dtype(rows.dtype, exact)) for x, rows in ((dk, spec.dk), (dv, spec.dv))))


def _round(x: Tensor, dtype: DType, exact: bool) -> Tensor:
    """To a dtype and back."""
    return x if exact else round_to(x, dtype).cast(x.dtype)


def _keep(spec: AttentionSpec, given: Given, extents: tuple[Any, ...]) -> Tensor:
    """Returns the factors of p."""
    b, h, g, row, column = (axis.cast(dtypes.uint64) for axis in axes(extents))
    matrix = (b * spec.batch[1] + h) * spec.batch[2] + g
    seed = given["seed"].cast(dtypes.uint64)
    found: Tensor = keeps(row, column, matrix, (seed[0], seed[1]), spec.kept)
    return found.contiguous().where(KEEP_ALL / spec.kept, 0.0).cast(dtypes.float32)


# **** scores ****

def _scores(spec: AttentionSpec, given: Given, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, −inf where they are hidden; whether there is such a row (the same for all columns); and the
    score's derivative by the sum: [*batch, s_q, s_kv] each."""
    q, k = (_operand(spec, given, name, exact) for name in "qk")
    extents = (*spec.batch, spec.s_q, spec.s_kv)
    sums = (q @ k.transpose(-1, -2)).contiguous()
    b, _, _, row, column = axes(extents)
    start, there, seen = Tensor(spec.start), (row >= 0).expand(extents), column >= 0
    if spec.is_ragged:
        rows, keys = ((given[name][1:] - given[name][:-1])[b] for name in ("cu_q", "cu_k"))
        start, there, seen = keys - rows, (row < rows).expand(extents), (row < rows) & (column < keys)
    score = evaluate(spec.score, extents, [sums], given, exact, {"start": start})
    if spec.band.first is not None: seen = seen & (column >= row + start + spec.band.first)
    if spec.band.last is not None: seen = seen & (column <= row + start + spec.band.last)
    slope = score.sum().gradient(sums)[0]
    return seen.where(score, -math.inf).contiguous(), there, slope


# **** operands ****

def _operand(spec: AttentionSpec, given: Given, name: str, exact: bool) -> Tensor:
    """q, k or v of every sequence, times their scales: [*batch, rows, d], 1 query head of k and v. What a
    sequence lacks is 0."""
    one, count, d = {"q": (spec.q, spec.s_q, spec.d), "k": (spec.k, spec.s_kv, spec.d),
                     "v": (spec.v, spec.s_kv, spec.d_v)}[name]
    place, wide = _place(spec, one, count, d, name != "q"), compute_dtype(dtypes.float32, exact)
    at = axes(place.extents)
    index, there = index_of(place, at), None
    if spec.is_ragged:
        begins = given["cu_q" if name == "q" else "cu_k"]
        there = at[3] < (begins[1:] - begins[:-1])[at[0]]
        index = there.where(index + begins[:-1][at[0]] * one.row, one.offset)
    found = elements(given[name], index.expand(place.extents)).cast(wide)
    if there is not None: found = there.where(found, 0)
    if spec.scales is not None:
        scale = spec.scales["qkv".index(name)]
        blocks = Place(scale.offset, place.extents[:-1], (*scale.batch, 1))
        row = at[3] // scale.rows * scale.block
        found = found * given[f"scale_{name}"][index_of(blocks, (*at[:3], row))].cast(wide)
    return found.contiguous()


def _place(spec: AttentionSpec, rows: Rows, count: int, d: int, keys: bool = False) -> Place:
    batch = (*spec.batch[:2], 1) if keys else spec.batch
    return Place(rows.offset, (*batch, count, d), (*rows.batch, rows.row, 1))


def _lay_out(spec: AttentionSpec, begins: Tensor, out: Tensor) -> Tensor:
    """Rows of sequences where they belong: [1, heads, group, total, d_v], zeros where they are none's."""
    assert spec.total is not None
    row, last = Tensor.arange(spec.total[0]), spec.batch[0] - 1
    sequence = (row.reshape(-1, 1) >= begins[1:].reshape(1, -1)).sum(-1)
    own = row - begins[sequence.minimum(last)]
    inside = (sequence <= last) & (own >= 0)
    flat = out.permute(0, 3, 1, 2, 4).reshape(-1, *out.shape[1:3], spec.d_v)
    found = flat[(sequence.minimum(last) * spec.s_q + own.maximum(0)).minimum(int(flat.shape[0]) - 1)]
    return inside.reshape(-1, 1, 1, 1).where(found, 0).permute(1, 2, 0, 3).unsqueeze(0)
