"""An ONNX graph that is being written.

Protocol: `node(op, inputs, …)` adds a node and gives the name of its output; `constant(array)` adds an
initializer, equal ones once. `save` writes the model, checked, with its weights in a file of their own where
a protobuf could not hold them.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, checker, helper, numpy_helper
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import OnnxError
from tinygrad_nv.onnx.elements import TYPES

INSIDE = 1 << 31 - 1    # bytes of a protobuf, and so of weights inside the model, are fewer than 2 GiB
IR_VERSION = 10         # of opset 21; runtimes refuse files of a later one than they know
DEFAULTS = {dtypes.weakint: dtypes.int32, dtypes.weakfloat: dtypes.float32}


def type_of(dtype: DType) -> int:
    """ONNX's type of a dtype. Raises `OnnxError`."""
    strong = DEFAULTS.get(dtype, dtype)
    if strong not in TYPES: raise OnnxError(f"a Tensor of {dtype}", "a dtype that ONNX has", "cast it first")
    return TYPES[strong]


class Builder:
    """Nodes and initializers of a graph in the order in which they are added."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._number = 0

    def fresh(self, stem: str) -> str:
        """A name that nothing has."""
        self._number += 1
        return f"{stem}_{self._number}"

    def node(self, op: str, *inputs: str, outputs: Sequence[str] = (), domain: str = "",
             **attributes: Any) -> str:
        """Adds a node; the name of its first output."""
        names = list(outputs) or [self.fresh(op)]
        self.nodes.append(helper.make_node(op, list(inputs), names, name=f"{op}/{names[0]}", domain=domain,
                                           **attributes))
        return names[0]

    def constant(self, array: np.ndarray, stem: str = "constant") -> str:
        """Adds an initializer; one of the same dtype, shape and values is not added again."""
        key = array.dtype.name, array.shape, sha256(np.ascontiguousarray(array).view(np.uint8).data).digest()
        if key not in self._known: self._known[key] = self.weight(self.fresh(stem), array)
        return self._known[key]

    def weight(self, name: str, array: np.ndarray, bfloat16: bool = False) -> str:
        """Adds an initializer under a name; `array` is of 16-bit patterns where it is bfloat16."""
        proto = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
        if bfloat16: proto.data_type = TensorProto.BFLOAT16
        self.initializers[name] = proto
        return name

    def integers(self, *numbers: int) -> str: return self.constant(np.array(numbers, dtype=np.int64), "shape")


def save(builder: Builder, name: str, inputs: Sequence[onnx.ValueInfoProto],
         outputs: Sequence[onnx.ValueInfoProto], path: Path, opset: int, external: bool | None,
         metadata: Mapping[str, str] | None = None) -> None:
    """Writes the model. `external`: weights in `path`.data; by default where they are too many for one file.
    Raises `OnnxError` for what onnx's checker refuses."""
    graph = helper.make_graph(builder.nodes, name, inputs, outputs, list(builder.initializers.values()))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)],
                              producer_name="tinygrad_nv", ir_version=max(IR_VERSION, _ir_version(opset)))
    if metadata: helper.set_model_props(model, dict(metadata))
    size = sum(len(each.raw_data) for each in builder.initializers.values())
    if external is None: external = size > INSIDE - (64 << 20)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = path.with_name(path.name + ".data")
    data.unlink(missing_ok=True)    # onnx appends to one that is there
    onnx.save(model, str(path), save_as_external_data=external, all_tensors_to_one_file=True,
              location=data.name, size_threshold=1024)
    try: checker.check_model(str(path), full_check=True)
    except (checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise OnnxError(f"the exported model is not valid: {error}", "",
                        "report this with the function that was exported") from error


def _ir_version(opset: int) -> int:
    """The IR version that came with an opset."""
    return int(helper.find_min_ir_version_for([helper.make_opsetid("", opset)], ignore_unknown=True))
