"""FlashAttention to a kernel of ours, which writes l too.

Protocol. `forward` is what patterns/named.py asks for. The body of the function, made again over its
arguments as the graph has them, is an attention like any other: match.py finds its spec (scale, soft-cap,
masks that are bands, strides of q, k and v, copies). Where it finds none, it has said why. The result lies as
q does: where q is a view of [B, S_q, H, D], as the heads of a projection are, so is the result, as the next
one reads it.

What an argument is computed from is of no interest here and may be the whole network: `Cut` puts a parameter
in the place of what lies under q's, k's and v's movement.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import GroupOp, Ops, UOp

from tinygrad_nv import hooks
from tinygrad_nv.patterns import named, program
from tinygrad_nv.patterns.attention import match as attention
from tinygrad_nv.patterns.attention import named as attention_named
from tinygrad_nv.patterns.attention.match import AttentionMatch
from tinygrad_nv.patterns.attention.named import FlashAttention
from tinygrad_nv.patterns.attention.spec import nbytes
from tinygrad_nv.patterns.contraction import NotOurs
from tinygrad_nv.patterns.index import Space
from tinygrad_nv.patterns.rewriting import rebuilt
from tinygrad_nv.patterns.strides import laid
from tinygrad_nv.patterns.target import Chosen, Target, choose
from tinygrad_nv.tile.attention.spec import EVERY, AttentionSpec
from tinygrad_nv.tile.expression import Apply, Expression, Load, Position, walk

NAME = "flash attention"
LSE = 1  # of FlashAttention's results
_CUT_SLOT = 1 << 20  # parameters of a graph have slots from 0
Shape = tuple[int, ...]


def register() -> None:
    """Lets FlashAttention become kernels. Without l it is left to match.py, which sees what follows."""
    named.lower(FlashAttention, NAME, forward, "NV_ATTENTION", LSE)


# **** what arguments are ****

class Cut:
    """Arguments without what they are computed from. `of` is what stands behind each parameter."""

    def __init__(self) -> None: self.of: dict[UOp, UOp] = {}

    def __call__(self, x: UOp) -> UOp:
        moved = []
        while x.op in GroupOp.Movement:
            moved.append(x)
            x = x.src[0]
        if x.device is not None and x.op not in (Ops.PARAM, Ops.BUFFER):
            known = next((param for param, node in self.of.items() if node is x), None)
            if known is None: self.of[known := x.param_like(_CUT_SLOT + len(self.of))] = x
            x = known
        for node in reversed(moved): x = node.replace(src=(x, *node.src[1:]))
        return x

    def undone(self, nodes: tuple[UOp, ...], end: UOp, made: Callable[[Callable[[UOp], UOp]], UOp]) -> UOp:
        """What `nodes`, a sink the last, were of, with `made` in the place of `end`."""
        def change(node: UOp, new: Callable[[UOp], UOp]) -> UOp | None:
            if node in self.of: return self.of[node]
            return made(new) if node is end else None
        return rebuilt(nodes, change).src[0]


def shape_of(x: UOp) -> Shape: return tuple(int(extent) for extent in x.shape)


# **** forward ****

def forward(what: FlashAttention, target: Target, *arguments: UOp) -> tuple[UOp, ...] | None:
    """out and l by a kernel; None where match.py has said why there is none."""
    cut = Cut()
    shown = (*map(cut, arguments[:3]), *arguments[3:])
    body = results(what, shown)
    for by_rows in dict.fromkeys((lies_by_rows(shown[0]), False)):
        root = turned(body[0]) if by_rows else body[0]
        nodes, match = attention.found_at(root)
        if match is None: return None
        if in_order(match, root, by_rows): break
    else: raise NotOurs("a result whose rows lie in another order than its heads")
    spec = dropped(replace(match.found.spec, lse=True), what, shown)
    how = choose(spec, target)
    logs: list[UOp] = []

    def called(new: Callable[[UOp], UOp]) -> UOp:
        inputs = [new(x) for x in match.found.inputs]
        if what.kept < EVERY: inputs.insert(3, arguments[-1])
        out, log = _attention(match, how, inputs)
        logs.append(log.reshape(shape_of(body[LSE])))
        return out
    result = cut.undone(nodes, match.attempt.end, called)
    return turned(result) if by_rows else result, logs[0]


def results(what: FlashAttention, arguments: tuple[UOp, ...]) -> tuple[UOp, ...]:
    """out and l as the body has them, of whole heads, as shards' are too: without dropout, which match.py
    does not look for. The last argument of dropout is its seed."""
    given = arguments[:-1] if what.kept < EVERY else arguments
    made = attention_named.forward(replace(what, kept=EVERY), *map(Tensor, given))
    return tuple(hooks.flattened(one.uop) for one in made)


def dropped(spec: AttentionSpec, what: FlashAttention, arguments: tuple[UOp, ...]) -> AttentionSpec:
    """The spec with the function's dropout, whose elements are known by their head and row: query heads that
    the spec has as rows become heads again. `arguments` begin with q and k."""
    if what.kept == EVERY: return spec
    (_, heads, rows, _), (_, kv, _, _) = map(shape_of, arguments[:2])
    if spec.s_q == rows: return replace(spec, kept=what.kept)
    group = heads // kv
    moved = any(isinstance(node, Position) and node.axis == "m" for node in walk(spec.score))
    if spec.batch[2] != 1 or spec.s_q != group * rows or moved or not spec.band.full:
        raise NotOurs(f"dropout of {spec.s_q} rows that are no head's")

    def score(node: Expression) -> Expression:
        if isinstance(node, Load):
            batch = node.batch or (0, 0, 0)
            return replace(node, batch=(*batch[:2], rows * node.m))
        return replace(node, args=tuple(map(score, node.args))) if isinstance(node, Apply) else node
    q, out = (replace(one, batch=(*one.batch[:2], rows * one.row)) for one in (spec.q, spec.out))
    return replace(spec, s_q=rows, batch=(*spec.batch[:2], group), q=q, out=out, score=score(spec.score),
                   kept=what.kept)


def lies_by_rows(x: UOp) -> bool:
    """Whether rows of all heads lie together, [B, S, H, D], of what is called [B, H, S, D]."""
    _, head, row, _ = laid(x).strides
    return 0 < head < row


def turned(x: UOp) -> UOp:
    """[B, H, S, D] as [B, S, H, D], and back."""
    return x.permute((0, 2, 1, 3))


def in_order(match: AttentionMatch, root: UOp, by_rows: bool) -> bool:
    """Whether l, dense [*batch, s_q], is the function's [B, H, S_q], where the result lies as `root`."""
    spec = match.found.spec
    space, node, end = Space(), root, match.attempt.end
    at = ranges = space.ranges(root.shape)
    while node is not end:
        if node.op in GroupOp.Movement: at = space.through(node, at)
        node = node.src[0]
    lies = space.lies(end.shape, at)
    dense = space.lies(root.shape, ranges)
    widths = (*spec.batch, spec.s_q)
    strides = (*spec.out.batch, spec.out.row)
    _, rows, heads, _ = shape_of(root)

    def log(stride: int) -> int:
        """How far apart in l what lies so far apart in the result is."""
        by = stride // spec.d_v
        if not by_rows: return by
        return (by // (heads * rows) * heads + by % heads) * rows + by // heads % rows
    kept = all(extent == 1 or log(stride) == prod(widths[i + 1:])
               for i, (extent, stride) in enumerate(zip(widths, strides, strict=True)))
    return match.attempt.last < 0 and lies.key() == dense.key() and kept


def _attention(match: AttentionMatch, how: Chosen, inputs: list[UOp]) -> tuple[UOp, UOp]:
    spec, end = how.spec, match.attempt.end
    outputs = [program.Output(shape_of(end), end.dtype),
               program.Output((*spec.batch, spec.s_q), dtypes.float32)]
    out, log = how.called(end.device, outputs, inputs, rows=spec.s_q, flops=spec.flops, nbytes=nbytes(spec))
    return out, log
