"""A function as a graph of UOps.

Protocol: `traced(fn, inputs)` calls the function with Tensors that stand for its inputs and gives the nodes
of its results. Functions known by name (attention, embedding, …) are replaced by what they compute in plain
tinygrad, so that only movement, elementwise operations and reductions are left.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad import Tensor
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import hooks
from tinygrad_nv.errors import OnnxError
from tinygrad_nv.transforms.tracing import enter, tracing


@dataclass(frozen=True)
class Traced:
    """The nodes that stand for inputs, and those of results by name."""
    inputs: tuple[UOp, ...]
    results: dict[str, UOp]


def trace(fn: Callable[..., Any], inputs: Sequence[Tensor], names: Sequence[str] | None) -> Traced:
    """The graph of a function. Raises `OnnxError` where a result is no Tensor, `TransformError` where a value
    is read in it."""
    given = [enter(each) for each in inputs]
    with hooks.disabled(), tracing(given, "export"): made = fn(*given)
    results = _name_results(made, names)
    leaves = tuple(each.uop for each in given)
    inlined = _inline_calls(UOp.sink(*results.values()), set(leaves))
    return Traced(leaves, dict(zip(results, inlined.src, strict=True)))


def _name_results(made: Any, names: Sequence[str] | None) -> dict[str, UOp]:
    """Results by name: a dict's keys, `names`, or output, output_1, …"""
    if isinstance(made, dict): results = dict(made)
    else:
        several = list(made) if isinstance(made, list | tuple) else [made]
        names = names or ["output", *(f"output_{i}" for i in range(1, len(several)))]
        if len(names) != len(several):
            raise OnnxError(f"{len(names)} names for {len(several)} results", "one name for each")
        results = dict(zip(names, several, strict=True))
    for name, each in results.items():
        if not isinstance(each, Tensor):
            raise OnnxError(f"the result {name!r} is a {type(each).__name__}", "Tensors",
                            "return Tensors: one, a tuple, or a dict by name")
    return {name: each.uop for name, each in results.items()}


def _inline_calls(sink: UOp, leaves: set[UOp]) -> UOp:
    """The graph with each call of a function replaced by what it computes."""
    while True:
        calls = [node for node in sink.toposort(enter_calls=False)
                 if node.op is Ops.GETTUPLE and node not in leaves and node.src[0].op is Ops.FUNCTION]
        # an input is a function of its own, too: what it is called with is no part of the graph
        calls = [node for node in calls if not _below(node, leaves)]
        if not calls: return sink
        sink = sink.substitute({node: _result(node) for node in calls}, walk=True)


def _below(node: UOp, leaves: set[UOp]) -> bool:
    return any(node is not leaf and node in leaf.toposort(enter_calls=False) for leaf in leaves)


def _result(node: UOp) -> UOp:
    """One result of a call in terms of its arguments."""
    function = node.src[0]
    body, arguments = function.src[0], function.src[1:]
    places = {each: arguments[each.arg.slot] for each in body.toposort(enter_calls=False)
              if each.op is Ops.PARAM and each.arg.slot >= 0 and each.arg.slot < len(arguments)}
    return body.src[node.arg].substitute(places, walk=True)
