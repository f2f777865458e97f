"""Function nodes with one dimension more: their results, and their gradients.

Protocol. `called(batch, node)` gives the results of a function node of which arguments are batched. A
function known by name stays one where named.py has a rule. Of any other the body is batched, and becomes the
body of a new node: the same numbers, in plain tinygrad. Its gradient, if it has a rule of its own, is that
rule for one example, batched: what is not batched gets the sum over examples.
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.transforms.batching.graph import Batch, Given, repeat_node
from tinygrad_nv.transforms.batching.named import batch_named

_numbers = count(1 << 30)   # of placeholders for one example


def call_function(batch: Batch, node: UOp) -> Sequence[UOp]:
    """The results of a function node, [n, …] each."""
    if isinstance(given_rule := node.arg.aux, Given):
        return given_rule.rule(node, [batch.made.get(each) for each in node.src[2:]], batch.n)
    arguments = [batch.made.get(each) for each in node.src[1:]]
    if (known := batch_named(node, arguments, batch.n)) is not None: return known
    body, own = node.src[0], {each.arg.slot: each for each in _parameters(node.src[0])}
    given = [old if new is None else new for old, new in zip(node.src[1:], arguments, strict=True)]
    inside = {own[i]: new.param_like(i) for i, new in enumerate(arguments) if new is not None and i in own}
    inner = Batch(inside, batch.n, call_function)
    results = [repeat_node(old, batch.n) if new is None else new
               for old, new in zip(body.src, inner.run(body.src), strict=True)]
    info = node.arg
    batched = [each is not None for each in arguments]
    back = None if info.grad_fxn is None else gradient_of(node, batched, batch.n)
    made = UOp.maketuple(*results).call(*given, grad_fxn=back, name=info.name, precompile=info.precompile,
                                        precompile_backward=info.precompile_backward)
    return [made.gettuple(i) for i in range(len(results))]


def _parameters(body: UOp) -> list[UOp]:
    return [each for each in body.toposort(enter_calls=False) if each.op is Ops.PARAM]


def gradient_of(node: UOp, batched: list[bool], n: int) -> Any:
    """The rule of a node for one example, for all of them; which arguments have a value for each."""
    def back(*given: UOp, call: UOp | None = None) -> tuple[UOp | None, ...]:
        gradients, made = (given, call) if call is not None else (given[:-1], given[-1])
        inputs = dict[UOp, UOp]()

        def one(value: UOp) -> UOp:
            mark = UOp.param(next(_numbers), value.dtype, tuple(value.shape[1:]), value.device)
            inputs[mark] = value
            return mark
        args = [one(value) if own else value for value, own in zip(made.src[1:], batched, strict=True)]
        single = node.replace(src=(node.src[0], *args))
        marks = [one(each) for each in gradients]
        rule = node.arg.grad_fxn    # as tinygrad calls it
        found = rule(*marks, call=single) if len(marks) > 1 else rule(marks[0], single)
        batch = Batch(inputs, n, call_function)
        batch.results[single] = [made.gettuple(i) for i in range(len(made.src[0].src))]
        new = batch.run([each for each in found if each is not None])
        rest = iter(zip([each for each in found if each is not None], new, strict=True))
        return tuple(None if each is None else _fits(*next(rest), own, n)
                     for each, own in zip(found, batched, strict=True))
    return back


def _fits(old: UOp, new: UOp | None, batched: bool, n: int) -> UOp:
    """A gradient as the argument needs it: of each example, or the sum over them."""
    whole = repeat_node(old, n) if new is None else new
    return whole if batched else whole.sum(0).cast(old.dtype)
