"""Ragged attention to a kernel of ours: from a named function's arguments to an attention of a ragged batch.

Protocol: `lower_varlen` is what patterns/named.py asks for. Where l is used, as a gradient does, the
sequences are documents of one row (varlen.py), whose l lies by rows. Where q, k and v lie is read off
their indices (patterns/strides.py), so that heads of a projection need no copy; what no template can read
where it lies is copied. What no template does is a near miss, and the body runs. """
from __future__ import annotations

import math
from dataclasses import replace

from tinygrad import Tensor
from tinygrad.dtype import dtypes
from tinygrad.uop.ops import UOp

from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.attention.varlen_reference import VarlenAttention, token_bounds
from tinygrad_nv.patterns.named import Uses
from tinygrad_nv.patterns.strides import Laid, copy_dense, lay_out
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.attention.documents import in_documents
from tinygrad_nv.tile.attention.spec import AttentionSpec, Rows
from tinygrad_nv.tile.expression import Expression, Load, Position, Sum, tanh, where

NAME = "attention"
LSE = 1             # the second result
LEAST_BYTES = 16  # of which rows begin at multiples, or they are copied: what every template reads


def lower_varlen(what: VarlenAttention, target: Target, uses: Uses, *arguments: UOp) -> tuple[UOp, ...]:
    """The result of a ragged attention by a kernel. Raises `Unsupported` or `SpecError` where there is
    none."""
    if LSE in uses.after: return _with_logs(what, target, *arguments)
    q, k, v, *more = arguments
    rest, sinks, distances = more[:2], more[2:2 + what.sinks], next(iter(more[2 + what.sinks:]), None)
    read = [_read(x) for x in (q, k, v)]
    shape = tuple(map(int, (*q.shape[:2], v.shape[2])))
    keys, sequences = (int(k.shape[0]), int(k.shape[1])), int(rest[0].shape[0]) - 1
    spec = _spec(what, read, shape, keys, int(q.shape[2]), sequences,
                 0 if distances is None else int(distances.shape[1]))
    share = spec.flops * shape[0] // (spec.batch[0] * spec.s_q)  # of as many rows as there are
    inputs = [*(each.storage for each in read), *rest, *(copy_dense(each).storage for each in sinks),
              *([] if distances is None else [distances])]
    return choose(spec, target).call(q.device, [program.Output(shape, q.dtype)], inputs, rows=spec.s_q,
                                       flops=min(spec.flops, share))


def _with_logs(what: VarlenAttention, target: Target, q: UOp, k: UOp, v: UOp, cu: UOp, _: UOp,
               *sinks: UOp) -> tuple[UOp, ...]:
    """The result, and l [H, rows]. Rows and keys are the same tokens."""
    read = [_read(x) for x in (q, k, v)]
    rows, heads, d_v = map(int, (*q.shape[:2], v.shape[2]))
    spec = _spec(replace(what, most_q=rows, most_k=rows), read, (rows, heads, d_v), (rows, int(k.shape[1])),
                 int(q.shape[2]), 1, 0)
    first, end = (Load(i, dtypes.int32, 1, 0) for i in range(2))
    column, hidden = Position("n"), -math.inf
    score = where(first < column + 1, where(column < end, spec.score, hidden), hidden)
    spec = in_documents(replace(spec, total=None, lse=True, score=score))
    bounds = [copy_dense(each.uop).storage for each in token_bounds(Tensor(cu), what.most_q, rows)]
    inputs = [*(each.storage for each in read), *(copy_dense(each).storage for each in sinks), *bounds]
    outputs = [program.Output((rows, heads, d_v), q.dtype), program.Output((heads, rows), dtypes.float32)]
    return choose(spec, target).call(q.device, outputs, inputs, flops=spec.flops)


def _spec(what: VarlenAttention, read: list[Laid], shape: tuple[int, ...], keys: tuple[int, int], d: int,
          sequences: int, distances: int) -> AttentionSpec:
    """The spec of operands: `shape` is the result's, `keys` are keys and key heads, `distances` how many
    there are for each head."""
    (rows, heads, d_v), group = shape, shape[1] // keys[1]
    q, k, v = read
    queries = Rows(q.dtype, q.strides[0], (0, group * q.strides[1], q.strides[1]), q.offset)
    shared, values = (Rows(x.dtype, x.strides[0], (0, x.strides[1], 0), x.offset) for x in (k, v))
    return AttentionSpec(what.most_q, what.most_k, d, d_v, queries, shared, values,
                         Rows(q.dtype, heads * d_v, (0, group * d_v, d_v)), (sequences, keys[1], group),
                         _score(what, distances, group), what.band, total=(rows, keys[0]),
                         sinks=(0, group, 1) if what.sinks else None)


def _score(what: VarlenAttention, distances: int, group: int) -> Expression:
    score = Sum() * what.scale
    if what.softcap is not None: score = tanh(score * (1 / what.softcap)) * what.softcap
    if not distances: return score
    return score + Load(0, dtypes.float32, -1, 1, (0, group * distances, distances), distances // 2)


def _read(x: UOp) -> Laid:
    """An operand where it lies, or copied where its rows could not be read there."""
    found = lay_out(x)
    row, head, d = found.strides
    lies = Rows(found.dtype, row, (0, head, 0), found.offset)
    return found if d == 1 and lies.alignment_bytes >= LEAST_BYTES else copy_dense(x)
