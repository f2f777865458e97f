"""`OnnxRunner`: an ONNX model as a function of Tensors.

Protocol: the model is read and checked once; its weights are on the default device from then on. A call
checks its inputs against the model's, evaluates the nodes into one lazy graph, and returns Tensors that are
not computed yet: `explain()` shows the kernels, `.numpy()` runs them, and TinyJit captures a call whose
shapes do not change.
"""
from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from tinygrad import Tensor

from tinygrad_nv.errors import OnnxError
from tinygrad_nv.onnx.elements import FLOAT8, Narrow, Value, dtype_of, from_numpy, held, name_of
from tinygrad_nv.onnx.fusion import fused
from tinygrad_nv.onnx.matrices import dequantized
from tinygrad_nv.onnx.model import graph_of, opsets, read
from tinygrad_nv.onnx.scope import Scope


class OnnxRunner:
    """An ONNX model that is called with a dict of inputs by name.

    `model` is a path, the bytes of a file, or a `ModelProto`. `inputs` and `outputs` are the names. Raises
    `OnnxError` for what is no model, and, when called, for inputs that do not fit and for ops that no
    function computes."""

    def __init__(self, model: str | Path | bytes | onnx.ModelProto) -> None:
        proto, directory = read(model)
        _load_operators()
        self.opsets = opsets(proto)
        self.graph = dequantized(fused(graph_of(proto.graph, self.opsets, directory, proto.ir_version >= 4)))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that a call must have. It may have those with defaults besides: initializers
        that are inputs, too."""
        return self.graph.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs, in the order of the model."""
        return self.graph.outputs

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs by name: Tensors, lists of Tensors for sequences, numpy arrays of objects for strings.

        `inputs` are Tensors, numpy arrays, numbers, lists for sequences. Elements of float8, float4, int4 and
        int2 are returned in float32 and int8 Tensors."""
        return {name: _plain(each) for name, each in self.values(inputs).items()}

    def values(self, inputs: Mapping[str, Any]) -> dict[str, Value]:
        """As `__call__`, with narrow types as they are (`elements.Narrow`)."""
        names = (*self.inputs, *self.graph.defaults)
        unknown = sorted(inputs.keys() - set(names))
        if unknown: raise OnnxError(f"the model has no input {unknown[0]!r}", f"inputs {', '.join(names)}")
        extents: dict[str, int] = {}
        given = {name: _input(name, inputs, self.graph.types[name], extents) for name in names
                 if name in inputs or name not in self.graph.defaults}
        scope = Scope(self.graph)
        scope.values.update(self.graph.defaults | given)
        return dict(zip(self.outputs, scope.run([given[name] for name in self.inputs]), strict=True))


def _load_operators() -> None:
    """Imports what registers functions in the table."""
    from tinygrad_nv.onnx import ops
    for each in pkgutil.iter_modules(ops.__path__): importlib.import_module(f"{ops.__name__}.{each.name}")


def _plain(x: Value) -> Any:
    """An output for users."""
    if isinstance(x, list): return [_plain(each) for each in x]
    if isinstance(x, np.ndarray) and x.dtype != object: return _plain(from_numpy(x))
    return x.tensor if isinstance(x, Narrow) else x


def _input(name: str, inputs: Mapping[str, Any], kind: onnx.TypeProto, extents: dict[str, int]) -> Value:
    """An input as a value. Named extents are equal in all inputs."""
    which = kind.WhichOneof("value")
    if inputs.get(name) is None:
        if which == "optional_type": return None
        raise OnnxError(f"no input {name!r}", "all inputs of the model by name", "add it")
    if which == "optional_type": return _input(name, inputs, kind.optional_type.elem_type, extents)
    if which == "sequence_type":
        return [_input(name, {name: each}, kind.sequence_type.elem_type, {}) for each in inputs[name]]
    if which != "tensor_type":
        raise OnnxError(f"input {name!r} is a {which}", "a tensor, a sequence or an optional")
    made = _tensor(name, inputs[name], kind.tensor_type.elem_type)
    _check_shape(name, made, kind.tensor_type, extents)
    return made


def _tensor(name: str, given: Any, kind: int) -> Value:
    """An input of one type of elements."""
    if kind == onnx.TensorProto.STRING: return from_numpy(np.asarray(given))
    if not isinstance(given, Tensor):
        array = given if isinstance(given, np.ndarray) else np.asarray(
            given, dtype=onnx.helper.tensor_dtype_to_np_dtype(kind))
        if array.dtype != onnx.helper.tensor_dtype_to_np_dtype(kind):
            raise OnnxError(f"input {name!r} of {array.dtype}", name_of(kind).lower(), "cast it first")
        return from_numpy(array, folds=False)
    if given.dtype != dtype_of(kind) and FLOAT8.get(given.dtype) != kind:
        raise OnnxError(f"input {name!r} of {given.dtype}", f"{dtype_of(kind)} for {name_of(kind)}",
                        "cast it first")
    return held(given, kind)


def _check_shape(name: str, x: Value, kind: onnx.TypeProto.Tensor, extents: dict[str, int]) -> None:
    """Compares an input's shape with the model's."""
    if not kind.HasField("shape"): return
    assert isinstance(x, Tensor | Narrow | np.ndarray)
    found = tuple((x.tensor if isinstance(x, Narrow) else x).shape)
    wanted = [each.dim_value if each.HasField("dim_value") else
              extents.get(each.dim_param, each.dim_param or "any") for each in kind.shape.dim]
    if len(found) != len(wanted) or any(isinstance(n, int) and n != m
                                        for n, m in zip(wanted, found, strict=True)):
        raise OnnxError(f"input {name!r} of shape {found}", f"({', '.join(map(str, wanted))})")
    extents |= {n: int(m) for n, m in zip(wanted, found, strict=True) if isinstance(n, str) and n != "any"}
