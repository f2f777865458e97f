"""FlashAttentionBackward to a kernel of ours.

Protocol. `backward` is what patterns/named.py asks for. The forward's body is built again over the same
arguments, and the spec that match.py finds for it is the backward's `forward`: its scores, masks and strides.
The gradient of the result is read where it lies, or copied. dq is summed in float32, on GPUs in memory that
is zero before the launch, and cast by a kernel of tinygrad's; dk and dv lie as k and v do (`lies_by_rows`).
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from tinygrad_nv import config, hooks
from tinygrad_nv.patterns import named, program
from tinygrad_nv.patterns.attention import match as attention
from tinygrad_nv.patterns.attention import named as attention_named
from tinygrad_nv.patterns.attention.lower import Cut, Shape, dropped, lies_by_rows, shape_of, turned
from tinygrad_nv.patterns.attention.named import FlashAttentionBackward
from tinygrad_nv.patterns.contraction import NotOurs
from tinygrad_nv.patterns.strides import Laid, copied, laid
from tinygrad_nv.patterns.target import Chosen, Target, choose
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.spec import EVERY, AttentionSpec, Rows
from tinygrad_nv.tile.expression import Apply, Expression, Load, Position, walk

NAME = "flash attention backward"


def register() -> None:
    """Lets FlashAttentionBackward become kernels."""
    named.lower(FlashAttentionBackward, NAME, backward, "NV_ATTENTION")


def backward(what: FlashAttentionBackward, target: Target, q: UOp, k: UOp, v: UOp,
             *rest: UOp) -> tuple[UOp, ...] | None:
    """dq, dk and dv by a kernel; None where match.py has said why there is none."""
    *mask, log, delta, grad = rest
    seed = [mask.pop()] if what.forward.kept < EVERY else []
    if (found := _forward(what, (q, k, v), tuple(mask))) is None: return None
    b, heads, rows, _ = shape_of(q)
    kv, by_rows = shape_of(k)[1], (lies_by_rows(k), lies_by_rows(v))
    # the query heads of a key head are rows, where each has one
    group, rows = (heads // kv, rows) if found[0].s_q == rows else (1, heads // kv * rows)
    forward = divided(found[0], (b, kv, group))
    if forward.s_q != rows: raise NotOurs(f"{forward.s_q} rows, not {rows}")
    grad = grad.reshape(b, kv, group, rows, shape_of(v)[-1])
    how, read = _chosen(forward, grad, by_rows, target)
    dq, dk, dv = _called(how, [*found[1][:3], read, log, delta, *seed, *found[1][3:]])
    dq = dq.reshape(shape_of(q)).cast(q.dtype)
    return dq, _filled(dk, shape_of(k), by_rows[0]), _filled(dv, shape_of(v), by_rows[1])


def _forward(what: FlashAttentionBackward, operands: tuple[UOp, ...],
             mask: tuple[UOp, ...]) -> tuple[AttentionSpec, list[UOp]] | None:
    """The spec of the forward pass, and its kernel's inputs."""
    cut = Cut()
    arguments = (Tensor(x) for x in (*map(cut, operands), *mask))
    root = hooks.flattened(attention_named.forward(replace(what.forward, kept=EVERY), *arguments)[0].uop)
    nodes, match = attention.found_at(root)
    if match is None: return None
    inputs: list[UOp] = []

    def given(new: Callable[[UOp], UOp]) -> UOp:
        inputs.extend(map(new, match.found.inputs))
        return match.attempt.end
    cut.undone(nodes, match.attempt.end, given)
    return dropped(replace(match.found.spec, lse=True), what.forward, operands), inputs


# **** specs ****

def divided(spec: AttentionSpec, batch: Shape) -> AttentionSpec:
    """A spec with this batch, where it has batch and key heads as one dimension."""
    if spec.batch == batch: return spec
    b, heads, group = batch
    if spec.batch != (1, b * heads, group):
        raise NotOurs(f"heads that lie as {'x'.join(map(str, spec.batch))}, not {'x'.join(map(str, batch))}")
    if any(isinstance(node, Position) and node.axis == 1 for node in walk(spec.score)):
        raise NotOurs("scores by the number of a head in the whole batch")

    def over(strides: tuple[int, ...]) -> tuple[int, int, int]:
        return strides[1] * heads, strides[1], strides[2]

    def score(node: Expression) -> Expression:
        if isinstance(node, Load) and node.batch: return replace(node, batch=over(node.batch))
        return replace(node, args=tuple(map(score, node.args))) if isinstance(node, Apply) else node
    q, k, v, out = (replace(rows, batch=over(rows.batch)) for rows in (spec.q, spec.k, spec.v, spec.out))
    return replace(spec, batch=(b, heads, group), q=q, k=k, v=v, out=out, score=score(spec.score))


def _chosen(forward: AttentionSpec, grad: UOp, by_rows: tuple[bool, bool],
            target: Target) -> tuple[Chosen, UOp]:
    """A backward pass, and the gradient's storage: where it lies if that can be."""
    reason, ordered = "", bool(config.get("NV_DETERMINISTIC"))
    for read in (laid(grad), copied(grad)):
        if read.strides[-1] != 1: continue
        spec = BackwardSpec(forward, _rows(read, forward), *_results(forward, by_rows), ordered)
        try: return choose(spec, target), read.storage
        except NotOurs as no: reason = str(no)
    raise NotOurs(reason)


def _rows(read: Laid, forward: AttentionSpec) -> Rows:
    *batch, row, _ = read.strides
    # the stride of a single row is free: that of dense rows
    if forward.s_q == 1: row = -(-forward.d_v // 8) * 8
    return Rows(read.dtype, row, (batch[0], batch[1], batch[2]), read.offset)


def _results(forward: AttentionSpec, by_rows: tuple[bool, bool]) -> tuple[Rows, Rows]:
    """dk and dv."""
    heads = forward.batch[1]

    def dense(dtype: DType, d: int, turned: bool) -> Rows:
        whole, matrix = heads * forward.s_kv * d, forward.s_kv * d
        return Rows(dtype, heads * d, (whole, d, 0)) if turned else Rows(dtype, d, (whole, matrix, 0))
    return dense(forward.k.dtype, forward.d, by_rows[0]), dense(forward.v.dtype, forward.d_v, by_rows[1])


def _filled(made: UOp, shape: Shape, by_rows: bool) -> UOp:
    """The gradient of all keys or values, of those that any row may see."""
    b, heads, rows, d = shape
    found = shape_of(made)[-1] // (b * heads * d)
    made = turned(made.reshape(b, found, heads, d)) if by_rows else made.reshape(b, heads, found, d)
    return made.pad(((0, 0), (0, 0), (0, rows - found), (0, 0))) if found < rows else made


# **** calls ****

def _called(how: Chosen, inputs: list[UOp]) -> tuple[UOp, ...]:
    """dq in float32, dk and dv."""
    spec, one = how.spec, how.spec.forward
    dq = program.Output((*one.batch, one.s_q, one.d), dtypes.float32)
    results = [program.Output((prod(one.batch[:2]) * one.s_kv * d,), rows.dtype)
               for rows, d in ((spec.dk, one.d), (spec.dv, one.d_v))]
    return how.called(inputs[0].device, [dq, *results], inputs, flops=spec.flops)
