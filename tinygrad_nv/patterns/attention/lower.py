"""FlashAttention to a kernel of ours.

Protocol. `forward` is what patterns/named.py asks for. The spec comes from the arguments (reading.py). Where
there is none, the reference implementation is inlined, of which match.py says why. Without the LSE the result
is written as what follows reads it, or stores it. With it, the result lies as q does, or as what follows
turns it: where q is a view of [B, S_q, H, D], as the heads of a projection are, so is the result, and where
the next projection reads it so.
"""
from __future__ import annotations

from dataclasses import replace

from tinygrad import dtypes
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.attention.attempt import Attempt, call_kernel, make_first
from tinygrad_nv.patterns.attention.named import FlashAttention
from tinygrad_nv.patterns.attention.reading import read_from, shape_of
from tinygrad_nv.patterns.attention.score import FLOATS
from tinygrad_nv.patterns.attention.spec import Found
from tinygrad_nv.patterns.attention.weights import NAME as NEAR
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.decode.match import choose_decode
from tinygrad_nv.patterns.named import Uses
from tinygrad_nv.patterns.strides import copy_dense, lay_out
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.attention.documents import in_documents
from tinygrad_nv.tile.attention.spec import KEEP_ALL, AttentionSpec
from tinygrad_nv.tile.expression import Apply, Expression, Load, Position, walk

OUT, LSE = 0, 1  # FlashAttention's results
BY_ROWS = (0, 2, 1, 3)


def forward(what: FlashAttention, target: Target, uses: Uses, *arguments: UOp) -> dict[UOp, UOp] | None:
    """The result in the place of a node that it is moved and cast to, and the LSE if it is used; None where
    there is no kernel: without the LSE match.py says why."""
    rest, sinks = (arguments, ()) if not what.sinks else (arguments[:-1], arguments[-1:])
    operands, seed = (rest, ()) if what.kept == KEEP_ALL else (rest[:-1], rest[-1:])
    lse = LSE in uses.after
    out = uses.call.gettuple(OUT)
    tail = () if lse else _tail(out, uses.after[OUT])
    made: dict[UOp, UOp] = {}

    def take(attempt: Attempt) -> None:
        until = tail[:tail.index(attempt.end) + 1] if attempt.end in tail else ()
        found = read_from(what, attempt, until, operands, lse)
        found = replace(found, spec=add_dropout(found.spec, what, operands))
        found, logits = add_sinks(found, sinks, operands)
        how = choose_decode(found, target) or choose(found.spec, target, found.integers)
        inputs = [*found.inputs[:3], *logits, *seed, *found.inputs[3:]]
        logs = [program.Output((*found.spec.batch, found.spec.s_q), dtypes.float32)] * lse
        made[attempt.end], *rest = call_kernel(attempt, found, how, inputs, *logs)
        for log in rest: made[uses.call.gettuple(LSE)] = log.reshape(shape_of(operands[0])[:3])
    by_rows = lse and (lies_by_rows(operands[0]) or any(map(_turns, uses.users.get(out, ()))))
    reason = make_first(_attempts(out, tail, by_rows), take)
    if reason and lse: program.miss(NEAR, out, reason)
    return made or None


def _tail(out: UOp, after: tuple[UOp, ...]) -> tuple[UOp, ...]:
    """Returns the end of the operations after a result that a kernel can do: movement that keeps its
    elements, and one cast of float32."""
    found, dtype = [], out.dtype
    for node in after:
        narrows = node.op is Ops.CAST and dtype == dtypes.float32 and node.dtype in FLOATS
        if node.op not in (Ops.PERMUTE, Ops.RESHAPE) and not narrows: break
        found.append(node)
        dtype = node.dtype
    return tuple(found)


def _turns(node: UOp) -> bool: return node.op is Ops.PERMUTE and node.marg == BY_ROWS


def _attempts(out: UOp, tail: tuple[UOp, ...], by_rows: bool) -> list[Attempt]:
    """Returns the places where an attention may end, best first: where its result is stored or read, since a
    matmul reads it best as it lies then; else after the last cast."""
    if by_rows: return [Attempt(out, lying=BY_ROWS), Attempt(out)]
    cast = [node for node in tail if node.op is Ops.CAST]
    return [Attempt(end, rows) for end in dict.fromkeys([*tail[-1:], *cast, out]) for rows in (True, False)]


def add_dropout(spec: AttentionSpec, what: FlashAttention, arguments: tuple[UOp, ...]) -> AttentionSpec:
    """The spec with the function's documents, and with its dropout, whose elements are known by their head
    and row: query heads that the spec has as rows become heads again. `arguments` begin with q and k."""
    if what.documents: spec = in_documents(spec)
    if what.kept == KEEP_ALL and not what.sinks: return spec
    (_, heads, rows, _), (_, kv, _, _) = map(shape_of, arguments[:2])
    if spec.s_q == rows: return replace(spec, kept=what.kept)
    group = heads // kv
    moved = any(isinstance(node, Position) and node.axis == "m" for node in walk(spec.score))
    if spec.batch[2] != 1 or spec.s_q != group * rows or moved or not spec.band.full:
        raise Unsupported(f"dropout or sinks of {spec.s_q} rows that are no head's")

    def score(node: Expression) -> Expression:
        if isinstance(node, Load):
            batch = node.batch or (0, 0, 0)
            return replace(node, batch=(*batch[:2], rows * node.m))
        return replace(node, args=tuple(map(score, node.args))) if isinstance(node, Apply) else node
    q, out = (replace(one, batch=(*one.batch[:2], rows * one.row)) for one in (spec.q, spec.out))
    return replace(spec, s_q=rows, batch=(*spec.batch[:2], group), q=q, out=out, score=score(spec.score),
                   kept=what.kept)


def add_sinks(found: Found, sinks: tuple[UOp, ...], arguments: tuple[UOp, ...]) -> tuple[Found, list[UOp]]:
    """An attention with sinks, if there are any, and where they lie: [H], or where the spec has batch and key
    heads as one dimension [B · H]. `arguments` begin with q and k."""
    if not sinks: return found, []
    (b, heads, rows, _), (_, kv, _, _) = map(shape_of, arguments[:2])
    group, spec = heads // kv, found.spec
    if spec.s_q != rows or spec.batch not in ((b, kv, group), (1, b * kv, group)):
        raise Unsupported(f"sinks of {heads} heads that lie as {'x'.join(map(str, spec.batch))}")
    (given,) = sinks
    if given.shape != (heads,): raise Unsupported(f"sinks {tuple(given.shape)} of {heads} heads of a shard")
    if spec.batch[0] != b: given = given.reshape((1, heads)).expand((b, heads)).reshape((b * heads,))
    there = lay_out(given)
    read = (there if (there.strides, there.offset) == ((1,), 0) else copy_dense(given)).storage
    return replace(found, spec=replace(spec, sinks=(0, group, 1))), [read]


def lies_by_rows(x: UOp) -> bool:
    """Whether rows of all heads lie together, [B, S, H, D], of what is called [B, H, S, D]."""
    _, head, row, _ = lay_out(x).strides
    return 0 < head < row


def swap_heads(x: UOp) -> UOp:
    """Returns [B, H, S, D] as [B, S, H, D], and back."""
    return x.permute((0, 2, 1, 3))
