"""Functions known by name that have a dimension for examples: batched, they are the same function of more of
them.

Protocol. `RULES` has for a kind how its calls are batched: a function of the node, of the batched values of
its arguments (None: it is the same for all) and n, that gives the results [n, …], or None where it cannot. A
`Rule` is one by axes: the axis of each argument that counts examples, and those of the results. `join`: n is
joined with that axis, as [n, B, …] → [n · B, …]; else it is one more leading dimension, which the function
takes anyway. `add_rule` is for kinds of layers above. There is no rule for what sums over examples (gradients
of weights), or draws random numbers by place: its reference implementation is batched.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad import Tensor
from tinygrad.uop.ops import UOp

from tinygrad_nv.patterns import conv, embedding, named, rope
from tinygrad_nv.patterns.attention import named as attention
from tinygrad_nv.patterns.norm import gated, group
from tinygrad_nv.patterns.quant_gemm import named as quant_gemm
from tinygrad_nv.tile.attention.spec import KEEP_ALL
from tinygrad_nv.transforms.batching.graph import repeat_node

Axes = tuple[int | None, ...]
Batched = Callable[[UOp, Sequence[UOp | None], int], Sequence[UOp] | None]


@dataclass(frozen=True)
class Rule:
    """How a kind is batched: `arguments(what, shapes)` are the axes of arguments, or None where it cannot
    be."""
    body: Callable[..., tuple[Tensor, ...]]
    arguments: Callable[[Any, list[tuple[int, ...]]], Axes | None]
    results: Axes = (0, 0, 0)
    join: bool = True

    def __call__(self, node: UOp, arguments: Sequence[UOp | None], n: int) -> list[UOp] | None:
        """The results [n, …] of a call, or None."""
        what, back = node.arg.aux, node.arg.grad_fxn
        # a gradient that closes over tensors of one example is not one of all
        if back is not None and back.__closure__: return None
        shapes = [tuple(each.shape) for each in node.src[1:]]
        axes = self.arguments(what, shapes)
        if axes is None: return None
        pairs = list(zip(arguments, axes, strict=True))
        if any(new is not None and axis is None for new, axis in pairs): return None
        size = _examples(shapes, axes)
        given = [old if axis is None else _join(old, new, axis, n, size, self.join)
                 for old, new, axis in zip(node.src[1:], arguments, axes, strict=True)]
        made = named.call(what, self.body, *map(Tensor, given), grad=back)
        return [_apart(each.uop, axis or 0, n, self.join)
                for each, axis in zip(made, self.results, strict=False)]


def _attention(what: attention.FlashAttention, shapes: list[tuple[int, ...]]) -> Axes | None:
    """q, k, v, then a mask or two tensors of documents, then sinks."""
    if what.kept != KEEP_ALL: return None
    return (0,) * (len(shapes) - what.sinks) + (None,) * what.sinks


def _attention_backward(what: attention.FlashAttentionBackward, shapes: list[tuple[int, ...]]) -> Axes | None:
    return None if what.forward.kept != KEEP_ALL else (0,) * len(shapes)


def _angles(what: Any, shapes: list[tuple[int, ...]]) -> Axes:
    """Returns the axes of what is rotated, then of cosines and sines, (T, half) or (B, T, half)."""
    return tuple(0 if len(shape) > 2 else None for shape in shapes)


def _images(what: conv.Convolution, shapes: list[tuple[int, ...]]) -> Axes:
    """Images, filters, then a bias and a residual, where they are."""
    return 0, None, *(0 if name == "residual" else None for name in what.extras)


def _groups(what: Any, shapes: list[tuple[int, ...]]) -> Axes:
    """x, weight, bias, and a shift, where there is one."""
    return (0, None, None, 0)[:len(shapes)]


def _first(what: Any, shapes: list[tuple[int, ...]]) -> Axes: return (0,) + (None,) * (len(shapes) - 1)


def _all(what: Any, shapes: list[tuple[int, ...]]) -> Axes: return (0,) * len(shapes)


def _tokens(what: Any, shapes: list[tuple[int, ...]]) -> Axes: return None, 0


RULES: dict[type, Batched] = {
    attention.FlashAttention: Rule(attention.forward, _attention),
    attention.FlashAttentionBackward: Rule(attention.backward, _attention_backward),
    rope.RotatedHeads: Rule(rope.rotate, _angles, (0, 1, 2)),
    rope.RotatedHeadsGradient: Rule(rope.derive, _angles),
    embedding.Embedding: Rule(embedding.select_rows, _tokens, join=False),
    gated.Gated: Rule(gated.activate, _all, join=False),
    gated.GatedGradient: Rule(gated.derive, _all, join=False),
    conv.Convolution: Rule(conv.convolve, _images),
    group.GroupNorm: Rule(group.normalise, _groups),
    quant_gemm.QuantMatmul: Rule(quant_gemm.multiply, _first, join=False)}


def add_rule(kind: type, rule: Batched) -> None:
    """Says how calls of a kind are batched."""
    RULES[kind] = rule


def batch_named(node: UOp, arguments: Sequence[UOp | None], n: int) -> Sequence[UOp] | None:
    """The results [n, …] of a named function, whose `arguments` are batched or None; None without a rule."""
    rule = RULES.get(type(node.arg.aux))
    return None if rule is None else rule(node, arguments, n)


def _examples(shapes: list[tuple[int, ...]], axes: Axes) -> int:
    """The extent of the axis of examples: a mask may have 1 for all."""
    return max((shape[axis] for shape, axis in zip(shapes, axes, strict=True)
                if axis is not None and axis < len(shape)), default=1)


def _join(old: UOp, new: UOp | None, axis: int, n: int, size: int, join: bool) -> UOp:
    """An argument for all examples."""
    whole = repeat_node(old, n) if new is None else new
    if not join: return whole
    shape = tuple(whole.shape)
    if shape[axis + 1] == 1 and size > 1:
        shape = (*shape[:axis + 1], size, *shape[axis + 2:])
        whole = whole.expand(shape)
    order = (*range(1, axis + 1), 0, *range(axis + 1, len(shape)))
    moved = whole.permute(order)
    return moved.reshape((*shape[1:axis + 1], n * shape[axis + 1], *shape[axis + 2:]))


def _apart(result: UOp, axis: int, n: int, join: bool) -> UOp:
    """A result as [n, …]."""
    if not join: return result
    shape = tuple(result.shape)
    split = result.reshape((*shape[:axis], n, shape[axis] // n, *shape[axis + 1:]))
    return split.permute((axis, *range(axis), *range(axis + 1, len(shape) + 1)))
