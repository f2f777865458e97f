"""A named attention as a `Reading`, from its arguments alone.

Protocol. `read_from` reads an attention that ends in some node: nothing is looked for, since the function
says what q, k, v and the mask are. Only its scores, which masks are part of, are translated from a graph:
that of the reference implementation over sums that are a parameter.
"""
from __future__ import annotations

import math

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import GroupOp, UOp

from tinygrad_nv import hooks
from tinygrad_nv.patterns.attention.attempt import Attempt
from tinygrad_nv.patterns.attention.dims import Ranges
from tinygrad_nv.patterns.attention.match import order_ranges
from tinygrad_nv.patterns.attention.named import FlashAttention, scores
from tinygrad_nv.patterns.attention.score import Score
from tinygrad_nv.patterns.attention.spec import Found, Reading, make_spec
from tinygrad_nv.patterns.contraction import Side, is_storage, side
from tinygrad_nv.patterns.index import Affine, Indices, Space
from tinygrad_nv.patterns.positions import is_variable

_SUMS_SLOT = 1 << 20  # parameters of a graph have slots from 0
Shape = tuple[int, ...]


def shape_of(x: UOp) -> Shape: return tuple(int(extent) for extent in x.shape)


def read_from(what: FlashAttention, attempt: Attempt, tail: tuple[UOp, ...], arguments: tuple[UOp, ...],
              lse: bool = False) -> Found:
    """The spec of an attention of q, k, v and the mask, if there is one, whose result [B, H, S_q, D_v] goes
    through the movement and casts of `tail`, of which the last is where the attempt ends. Raises
    `Unsupported`, `Unfused`, `NotAffine` or `SpecError`."""
    space, end = Space(), attempt.end
    q, k, v, *mask = arguments
    batch, heads, rows, d = shape_of(q)
    _, kv, keys, _ = shape_of(v)
    kept = at = space.ranges(end.shape)
    out = space.lies([end.shape[i] for i in attempt.order], tuple(kept[i] for i in attempt.order))
    for node in reversed(tail):
        if node.op in GroupOp.Movement: at = space.through(node, at)
    log = space.lies(shape_of(q)[:3], at[:3]) if lse else None
    b, h, r, width = at
    key_head, _ = space.digits(h, (kv, heads // kv))
    c, e = space.ranges((keys, d))
    sums = UOp.param(_SUMS_SLOT, dtypes.float32, (batch, heads, rows, keys), q.device)
    score, variables = _score(space, what, sums, d, mask, (b, h, r, c))
    columns = frozenset(c.strides)
    def of(x: UOp, *indices: Affine) -> Side: return side(space, x, indices, False, is_storage)
    sides = of(q, b, h, r, e), of(k, b, key_head, c, e), of(v, b, key_head, c, width)
    counted = Ranges(tuple(c.strides), tuple(e.strides), frozenset(),
                     order_ranges(space, (b, h, r, c), columns))
    return make_spec(Reading(space, end, score, sides, out, counted, variables, log), attempt.rows)


def _score(space: Space, what: FlashAttention, sums: UOp, d: int, mask: list[UOp],
           at: Indices) -> tuple[Score, dict[str, UOp]]:
    """The exponent of 2 of the weights, and the variables in it by name."""
    exponent = scores(what, Tensor(sums), d, *map(Tensor, mask)) * (1 / math.log(2))
    end = hooks.flatten(exponent.uop)
    nodes = end.toposort(enter_calls=False)
    region = {sums}
    for node in nodes:
        if not region.isdisjoint(node.src): region.add(node)
    score = Score(space, sums, end, frozenset(region), at, is_storage, frozenset(at[-1].strides))
    return score, {node.expr: node for node in nodes if is_variable(node)}
