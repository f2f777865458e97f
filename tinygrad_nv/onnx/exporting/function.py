"""`export`: a Tensor function as an ONNX model.

Protocol: the function is called once with Tensors that stand for its inputs (`trace`); the graph of UOps,
before scheduling, becomes ONNX nodes (nodes.py): Reshape, Transpose, Slice, Pad, elementwise operations,
reductions, and MatMul and Gather, which are found among the reductions. Tensors that the function closes over
are weights. Shapes are those of the example; the model is checked before `export` returns.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import defs, helper
from tinygrad import Tensor
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import hooks
from tinygrad_nv.errors import OnnxError
from tinygrad_nv.onnx.exporting.builder import Builder, save, type_of
from tinygrad_nv.onnx.exporting.nodes import Graph
from tinygrad_nv.transforms.tracing import enter, tracing

LEAST = 21      # opset


def export(fn: Callable[..., Any], example_inputs: Sequence[Tensor] | Mapping[str, Tensor], path: str | Path,
           opset: int = LEAST, output_names: Sequence[str] | None = None,
           external_data: bool | None = None) -> Path:
    """Writes fn as an ONNX model that takes Tensors of the examples' shapes and dtypes.

    `example_inputs` are fn's arguments in order, or a dict by name whose values are. fn returns a Tensor, a
    tuple, or a dict by name. `external_data`: weights in `path`.data; by default where they exceed the 2 GiB
    of a protobuf. The file passes `onnx.checker`. Raises `OnnxError` for what ONNX cannot say,
    `TransformError` where fn reads a value."""
    check_opset(opset)
    given = dict(example_inputs) if isinstance(example_inputs, Mapping) else \
        {"input" if i == 0 else f"input_{i}": each for i, each in enumerate(example_inputs)}
    for name, each in given.items():
        if not isinstance(each, Tensor):
            raise OnnxError(f"the input {name!r} is a {type(each).__name__}", "example Tensors",
                            "close over numbers instead")
    made = trace(fn, list(given.values()), output_names)
    builder = Builder()
    graph = Graph(builder, dict(zip(made.inputs, given, strict=True)))
    for name, node in made.results.items(): builder.node("Identity", graph.name(node), outputs=[name])
    inputs = [helper.make_tensor_value_info(name, type_of(each.dtype), list(map(int, each.shape)))
              for name, each in given.items()]
    outputs = [helper.make_tensor_value_info(name, type_of(node.dtype), list(map(int, node.shape)))
               for name, node in made.results.items()]
    name = getattr(fn, "__name__", type(fn).__name__)
    save(builder, name, inputs, outputs, Path(path), opset, external_data)
    return Path(path)


def check_opset(opset: int) -> None:
    """Raises `OnnxError` for an opset that is not written."""
    if not LEAST <= opset <= defs.onnx_opset_version():
        raise OnnxError(f"opset {opset}", f"{LEAST} to {defs.onnx_opset_version()}", "choose another")


@dataclass(frozen=True)
class Traced:
    """The nodes that stand for inputs, and those of results by name."""
    inputs: tuple[UOp, ...]
    results: dict[str, UOp]


def trace(fn: Callable[..., Any], inputs: Sequence[Tensor], names: Sequence[str] | None) -> Traced:
    """The graph of a function, which is called with Tensors that stand for its inputs. Functions known by
    name (attention, embedding, …) are replaced by what they compute in plain tinygrad, so that only movement,
    elementwise operations and reductions are left. Raises `OnnxError` where a result is no Tensor,
    `TransformError` where a value is read in it."""
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
