"""`export`: a Tensor function as an ONNX model.

Protocol: the function is called once with Tensors that stand for its inputs (trace.py); the graph of UOps,
before scheduling, becomes ONNX nodes (nodes.py): Reshape, Transpose, Slice, Pad, elementwise operations,
reductions, and MatMul and Gather, which are found among the reductions. Tensors that the function closes over
are weights. Shapes are those of the example; the model is checked before `export` returns.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx import defs, helper
from tinygrad import Tensor

from tinygrad_nv.errors import OnnxError
from tinygrad_nv.onnx.exporting.builder import Builder, save, type_of
from tinygrad_nv.onnx.exporting.nodes import Graph
from tinygrad_nv.onnx.exporting.trace import trace

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
