"""A model file as graphs: read, checked, and its constants loaded once.

Protocol: `read(model)` gives a `ModelProto` that onnx's checker accepts, and the directory of its external
data. `graph_of(proto, …)` turns a GraphProto into a `Graph`: nodes with their attributes as Python values,
constants as values. A small constant stays a numpy array, so that shape arithmetic needs no device; a scalar
becomes a constant of the Tensor graph; the others are Tensors on the default device.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf import json_format, text_format  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]
from onnx import AttributeProto, checker, helper, inliner, numpy_helper
from tinygrad import Tensor

from tinygrad_nv.errors import OnnxError
from tinygrad_nv.onnx.elements import Value, from_numpy, name_of, numeric
from tinygrad_nv.onnx.limits import FILE_BYTES, budget, check_size, require_text, shorten

HOST_SIZE = 64      # elements of a constant that the host keeps: extents, axes, pads
# what checkers ask of outputs, and runtimes do not
UNTYPED = ("Field 'shape' of 'type' is required but missing",
           "Field 'type' of 'value_info' is required but missing")
SPARSE = "write the sparse constant again"
KINDS = set(onnx.TensorProto.DataType.values()) - {onnx.TensorProto.UNDEFINED}
BITS = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}
FACTORS = 8         # elements of one that is floats: factors of Resize; a bias is longer


@dataclass(frozen=True, eq=False)
class Node:
    """One node. `version` is the opset of its domain; an attribute that is a graph is a `Graph`."""
    op: str
    domain: str
    version: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    proto: onnx.NodeProto = field(repr=False)
    directory: str = ""     # of external data

    @property
    def place(self) -> str:
        """The node in words, for errors."""
        return f"node {shorten(repr(self.name or ', '.join(self.outputs)))} (op {shorten(self.op)}, " \
               f"domain {shorten(self.domain) or 'ai.onnx'}, opset {self.version})"


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph, or the body of a node. `types` are those of its inputs and outputs. `defaults` are constants
    that a call may replace: initializers that are inputs, too (since IR version 4)."""
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: dict[str, Value]
    types: dict[str, onnx.TypeProto]
    defaults: dict[str, Value] = field(default_factory=dict)


def read(model: str | Path | bytes | onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """The model, with its own functions inlined, and the directory of external data. Raises `OnnxError`."""
    proto, directory = _parse(model)
    check_size(proto)
    try: checker.check_model(str(model) if isinstance(model, str | Path) else proto)
    except (checker.ValidationError, ValueError, RuntimeError, EncodeError) as error:
        if not any(each in str(error) for each in UNTYPED):
            raise OnnxError(f"a model that onnx's checker refuses: {_first_line(error)}",
                            f"a model of IR version up to {onnx.IR_VERSION} that onnx.checker accepts",
                            "export the model again") from error
    return (inliner.inline_local_functions(proto) if proto.functions else proto), directory


def _parse(model: str | Path | bytes | onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """The message and the directory of its external data."""
    if isinstance(model, onnx.ModelProto): return model, ""
    path = None if isinstance(model, bytes) else Path(model)
    if path is not None and not _is_file(path):
        raise OnnxError(f"no file at {shorten(str(path))}", "an ONNX model file", "check the path")
    if (size := len(model) if isinstance(model, bytes) else path.stat().st_size) > FILE_BYTES:  # type: ignore[union-attr]
        raise OnnxError(f"an ONNX file of {size} bytes", f"{FILE_BYTES} at most, as protobuf has it",
                        "keep weights as external data: onnx.save(…, save_as_external_data=True)")
    try:
        proto = onnx.load_model_from_string(model) if isinstance(model, bytes) else \
            onnx.load(str(path), load_external_data=False)
    # the text formats, which onnx.load chooses by the file's suffix, have errors of their own
    except (DecodeError, json_format.Error, text_format.Error, onnx.parser.ParseError, RecursionError,
            ValueError, OSError) as error:
        name = f"{len(model)} bytes" if isinstance(model, bytes) else str(path)
        raise OnnxError(f"{name}: no ONNX model ({_first_line(error)})", "what onnx.save writes",
                        "check that the file is whole") from error
    return proto, "" if path is None else str(path.parent)


def _is_file(path: Path) -> bool:
    """Whether there is a regular file. False for what is no path: too long, with a null byte, not text."""
    try: return path.is_file()
    except (OSError, ValueError): return False


def _first_line(error: Exception) -> str:
    return shorten((str(error).strip().splitlines() or [type(error).__name__])[0])


def opsets(proto: onnx.ModelProto) -> dict[str, int]:
    """The version of each domain."""
    return {_domain(each.domain): each.version for each in proto.opset_import}


def graph_of(proto: onnx.GraphProto, versions: dict[str, int], directory: str,
             replaceable: bool = False) -> Graph:
    """A graph; `replaceable`: whether initializers that are inputs are defaults. Raises `OnnxError` for what
    cannot be read, with the name of the tensor or the node."""
    require_text("a graph", *(each.name for each in (*proto.initializer, *proto.input, *proto.output)),
                 *(each.values.name for each in proto.sparse_initializer),
                 *(dim.dim_param for each in proto.input for dim in each.type.tensor_type.shape.dim))
    constants = {each.name: _constant(each, directory) for each in proto.initializer}
    if held := [each for each in constants.values() if isinstance(each, Tensor)]: Tensor.realize(*held)
    constants |= {each.values.name: _dense(each, directory) for each in proto.sparse_initializer}
    types = {each.name: each.type for each in proto.input}
    inputs = tuple(name for name in types if name not in constants)
    defaults = {name: constants.pop(name) for name in types if name in constants} if replaceable else {}
    nodes = tuple(node_of(each, versions, directory) for each in proto.node)
    types |= {each.name: each.type for each in proto.output}
    for each in nodes: _check_divisor(each, constants)
    return Graph(nodes, inputs, tuple(each.name for each in proto.output), constants, types, defaults)


def _check_divisor(node: Node, constants: dict[str, Value]) -> None:
    """Refuses an integer division by a constant with a 0. (Of a large one, too, which is a Tensor.)"""
    if node.op not in ("Div", "Mod") or len(node.inputs) < 2: return
    if (given := constants.get(node.inputs[1])) is None: return
    by = given.numpy() if isinstance(given, Tensor) and not given.is_floating_point() else given
    if not isinstance(by, np.ndarray) or by.dtype.kind not in "iu" or by.all(): return
    raise OnnxError(f"{node.op} of integers by {node.inputs[1]!r}, with a 0 among its {by.size} elements",
                    "divisors other than 0", "correct the initializer")


def node_of(proto: onnx.NodeProto, versions: dict[str, int], directory: str = "") -> Node:
    """A node with its attributes as Python values."""
    domain = _domain(proto.domain)
    made = Node(proto.op_type, domain, versions.get(domain, 1), proto.name, tuple(proto.input),
                tuple(proto.output), {}, proto, directory)
    for each in proto.attribute:
        try: made.attributes[each.name] = _attribute(each, versions, directory)
        except OnnxError as error:
            if error.found.startswith("node "): raise
            raise OnnxError(f"{made.place}, attribute {shorten(each.name)!r}: {error.found}",
                            error.expected, error.fix) from error
    return made


def _domain(name: str) -> str: return "" if name == "ai.onnx" else name


def _attribute(proto: AttributeProto, versions: dict[str, int], directory: str) -> Any:
    """An attribute: text for bytes, an array for a tensor."""
    if proto.type == AttributeProto.GRAPH: return graph_of(proto.g, versions, directory)
    if proto.type == AttributeProto.TENSOR: return _array(proto.t, directory)
    if proto.type == AttributeProto.SPARSE_TENSOR: return _dense(proto.sparse_tensor, directory)
    try: found = helper.get_attribute_value(proto)
    except ValueError as error:
        raise OnnxError(f"a type {proto.type}", "a type that ONNX has", "export the model again") from error
    if isinstance(found, bytes): return _text(found)
    if not isinstance(found, list | tuple) and not hasattr(found, "extend"): return found
    return [_text(each) if isinstance(each, bytes) else each for each in found]


def _text(found: bytes) -> str:
    try: return found.decode()
    except UnicodeDecodeError as error:
        raise OnnxError(f"bytes that are not UTF-8: {found[:40]!r}", "text",
                        "export the model again") from error


def _array(proto: onnx.TensorProto, directory: str) -> np.ndarray:
    """The elements of a tensor of the file, or of the file that it names in `directory`."""
    if proto.data_type not in KINDS:
        raise OnnxError(f"the constant {shorten(proto.name)!r} has elements of type {proto.data_type}",
                        "a type of elements that ONNX has", "export the model again")
    external = proto.data_location == onnx.TensorProto.EXTERNAL
    # (onnx would look in the working directory)
    if external and not directory:
        raise OnnxError(f"the constant {shorten(proto.name)!r} is in a file beside the model, which was "
                        "given without its path", "a path, or a model with its data",
                        "give the path of the model")
    if external: proto = _with_length(proto)
    try: return numpy_helper.to_array(proto, base_dir=directory)
    except (ArithmeticError, LookupError, MemoryError, OSError, ValueError, TypeError, RuntimeError,
            checker.ValidationError) as error:
        raise OnnxError(f"the constant {shorten(proto.name)!r} cannot be read: {_first_line(error)}",
                        "its data in the model, or in the file that it names beside it",
                        "keep external data files beside the model") from error


def _with_length(proto: onnx.TensorProto) -> onnx.TensorProto:
    """A tensor of another file with the number of its bytes there: without it onnx reads the whole file."""
    name = shorten(proto.name)
    if proto.data_type == onnx.TensorProto.STRING or min(proto.dims, default=0) < 0:
        raise OnnxError(f"the constant {name!r} of {name_of(proto.data_type)} and shape "
                        f"{shorten(str(tuple(proto.dims)))} in another file", "numbers",
                        "keep it in the model")
    nbytes = -(-math.prod(proto.dims) * BITS.get(
        name_of(proto.data_type), 8 * helper.tensor_dtype_to_np_dtype(proto.data_type).itemsize) // 8)
    given = [each.value for each in proto.external_data if each.key == "length"]
    if any(each.lstrip("0") != str(nbytes) for each in given if each.isascii() and each.isdigit() and nbytes):
        raise OnnxError(f"the constant {name!r} has {shorten(given[-1])} bytes in another file",
                        f"{nbytes} bytes for its type and shape", "export the model again")
    budget().hold(nbytes)
    made = onnx.TensorProto()
    made.CopyFrom(proto)
    if not given: made.external_data.add(key="length", value=str(nbytes))
    return made


def _constant(proto: onnx.TensorProto, directory: str) -> Value:
    """A small constant as an array, another one on the device."""
    array = _array(proto, directory)
    most = FACTORS if array.dtype.kind == "f" else HOST_SIZE
    if array.ndim <= 1 and array.size <= most and numeric(array): return array
    return from_numpy(array)


def _dense(proto: onnx.SparseTensorProto, directory: str) -> np.ndarray:
    """A sparse constant with its zeros. Indices number elements, or are a row of places for each value."""
    values, indices = _array(proto.values, directory), _array(proto.indices, directory)
    dims, name = tuple(proto.dims), shorten(proto.values.name)
    if not numeric(values) or values.ndim != 1 or min(dims, default=0) < 0 or indices.dtype != np.int64 \
            or indices.shape not in ((values.size,), (values.size, len(dims))):
        raise OnnxError(f"the sparse constant {name!r} of shape {dims} has values {values.dtype}"
                        f"{list(values.shape)} and indices {indices.dtype}{list(indices.shape)}",
                        "numbers in one dimension, and an int64 index or a row of indices for each", SPARSE)
    budget().spread(values.nbytes, dims, values.dtype.itemsize)
    most = np.array(dims if indices.ndim == 2 else [math.prod(dims)], np.int64)
    if ((indices < 0) | (indices >= (most if indices.ndim == 2 else most[0]))).any():
        raise OnnxError(f"the sparse constant {name!r} of shape {dims} has an index out of it",
                        f"indices from 0, below {most.tolist()}", SPARSE)
    made = np.zeros(dims, dtype=values.dtype)
    if indices.ndim == 1: made.reshape(-1)[indices] = values
    else: made[tuple(indices.T)] = values
    return made
