"""FlashAttentionBackward to a kernel of ours.

Protocol. `backward` is what patterns/named.py asks for. The spec of the forward pass, from the same
arguments, is the backward's `forward`: its scores, masks and strides. The gradient of the result is read
where it lies, or copied. dq is summed in float32, on GPUs in memory that is zero before the launch, and cast
by a kernel of tinygrad's; dk and dv lie as k and v do (`lies_by_rows`).
"""
from __future__ import annotations

from dataclasses import replace
from math import prod

from tinygrad import dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from tinygrad_nv import config
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.attention.attempt import Attempt, make_first
from tinygrad_nv.patterns.attention.lower import add_dropout, lies_by_rows, swap_heads
from tinygrad_nv.patterns.attention.named import FlashAttention, FlashAttentionBackward
from tinygrad_nv.patterns.attention.reading import Shape, read_from, shape_of
from tinygrad_nv.patterns.attention.spec import Found
from tinygrad_nv.patterns.attention.weights import NAME as NEAR
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.strides import Laid, copy_dense, lay_out
from tinygrad_nv.patterns.target import Chosen, Target, choose
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.spec import KEEP_ALL, AttentionSpec, Rows
from tinygrad_nv.tile.expression import Apply, Expression, Load, Position, walk


def backward(what: FlashAttentionBackward, target: Target, q: UOp, k: UOp, v: UOp,
             *rest: UOp) -> tuple[UOp, ...] | None:
    """dq, dk and dv by a kernel; None where there is no forward pass, with the reason told."""
    *mask, log, delta, grad = rest
    seed = [mask.pop()] if what.forward.kept < KEEP_ALL else []
    if (found := _forward(what.forward, (q, k, v, *mask), grad, target)) is None: return None
    b, heads, rows, _ = shape_of(q)
    kv, by_rows = shape_of(k)[1], (lies_by_rows(k), lies_by_rows(v))
    # the query heads of a key head are rows, where each has one
    group, rows = (heads // kv, rows) if found.spec.s_q == rows else (1, heads // kv * rows)
    forward = split_batch(found.spec, (b, kv, group))
    if forward.s_q != rows: raise Unsupported(f"{forward.s_q} rows, not {rows}")
    grad = grad.reshape(b, kv, group, rows, shape_of(v)[-1])
    how, read = _choose(forward, grad, by_rows, target)
    dq, dk, dv = _call_kernel(how, [*found.inputs[:3], read, log, delta, *seed, *found.inputs[3:]])
    dq = dq.reshape(shape_of(q)).cast(q.dtype)
    return dq, _fill_gradient(dk, shape_of(k), by_rows[0]), _fill_gradient(dv, shape_of(v), by_rows[1])


def _forward(what: FlashAttention, operands: tuple[UOp, ...], grad: UOp, target: Target) -> Found | None:
    """The forward pass, whose result has the gradient's shape and dtype; None without a kernel for it."""
    made: list[Found] = []

    def take(attempt: Attempt) -> None:
        found = read_from(what, attempt, (), operands, True)
        choose(found.spec, target)
        made.append(found)
    reason = make_first([Attempt(grad, rows) for rows in (True, False)], take)
    if reason: program.miss(NEAR, grad, reason)
    if not made: return None
    return replace(made[0], spec=add_dropout(made[0].spec, what, operands))


# **** specs ****

def split_batch(spec: AttentionSpec, batch: Shape) -> AttentionSpec:
    """A spec with this batch, where it has batch and key heads as one dimension."""
    if spec.batch == batch: return spec
    b, heads, group = batch
    if spec.batch != (1, b * heads, group):
        raise Unsupported(f"heads that lie as {'x'.join(map(str, spec.batch))}, "
                          f"not {'x'.join(map(str, batch))}")
    if any(isinstance(node, Position) and node.axis == 1 for node in walk(spec.score)):
        raise Unsupported("scores by the number of a head in the whole batch")

    def over(strides: tuple[int, ...]) -> tuple[int, int, int]:
        return strides[1] * heads, strides[1], strides[2]

    def score(node: Expression) -> Expression:
        if isinstance(node, Load) and node.batch: return replace(node, batch=over(node.batch))
        return replace(node, args=tuple(map(score, node.args))) if isinstance(node, Apply) else node
    q, k, v, out = (replace(rows, batch=over(rows.batch)) for rows in (spec.q, spec.k, spec.v, spec.out))
    return replace(spec, batch=(b, heads, group), q=q, k=k, v=v, out=out, score=score(spec.score))


def _choose(forward: AttentionSpec, grad: UOp, by_rows: tuple[bool, bool],
            target: Target) -> tuple[Chosen, UOp]:
    """A backward pass, and the gradient's storage: where it lies if that can be."""
    reason, ordered = "", bool(config.get("NV_DETERMINISTIC"))
    for read in (lay_out(grad), copy_dense(grad)):
        if read.strides[-1] != 1: continue
        spec = BackwardSpec(forward, _rows(read, forward), *_results(forward, by_rows), ordered)
        try: return choose(spec, target), read.storage
        except Unsupported as no: reason = str(no)
    raise Unsupported(reason)


def _rows(read: Laid, forward: AttentionSpec) -> Rows:
    *batch, row, _ = read.strides
    # the stride of a single row is free: that of dense rows
    if forward.s_q == 1: row = -(-forward.d_v // 8) * 8
    return Rows(read.dtype, row, (batch[0], batch[1], batch[2]), read.offset)


def _results(forward: AttentionSpec, by_rows: tuple[bool, bool]) -> tuple[Rows, Rows]:
    """dk and dv."""
    heads = forward.batch[1]

    def dense(dtype: DType, d: int, bshd: bool) -> Rows:
        whole, matrix = heads * forward.s_kv * d, forward.s_kv * d
        return Rows(dtype, heads * d, (whole, d, 0)) if bshd else Rows(dtype, d, (whole, matrix, 0))
    return dense(forward.k.dtype, forward.d, by_rows[0]), dense(forward.v.dtype, forward.d_v, by_rows[1])


def _fill_gradient(made: UOp, shape: Shape, by_rows: bool) -> UOp:
    """The gradient of all keys or values, of those that any row may see."""
    b, heads, rows, d = shape
    found = shape_of(made)[-1] // (b * heads * d)
    made = swap_heads(made.reshape(b, found, heads, d)) if by_rows else made.reshape(b, heads, found, d)
    return made.pad(((0, 0), (0, 0), (0, rows - found), (0, 0))) if found < rows else made


# **** calls ****

def _call_kernel(how: Chosen, inputs: list[UOp]) -> tuple[UOp, ...]:
    """dq in float32, dk and dv."""
    spec, one = how.spec, how.spec.forward
    dq = program.Output((*one.batch, one.s_q, one.d), dtypes.float32)
    results = [program.Output((prod(one.batch[:2]) * one.s_kv * d,), rows.dtype)
               for rows, d in ((spec.dk, one.d), (spec.dv, one.d_v))]
    return how.call(inputs[0].device, [dq, *results], inputs, flops=spec.flops)
