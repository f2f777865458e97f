"""`OnnxRunner`: an ONNX model as a function of Tensors.

Protocol: the model is read and checked once; its weights are on the default device from then on. The first
call of a kind of inputs checks them against the model's, evaluates the nodes into one lazy graph, and
compiles its launches; other calls of the kind replay them (captured.py). Where nothing can be captured, and
under TinyJit and transforms, a call returns Tensors that are not computed yet.
"""
from __future__ import annotations

import importlib
import pkgutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from tinygrad import Tensor, dtypes
from tinygrad.device import Device
from tinygrad.engine.realize import capturing

from tinygrad_nv.errors import NVError, OnnxError
from tinygrad_nv.onnx.captured import NotCaptured, ValueNeeded, capture
from tinygrad_nv.onnx.elements import (
    FLOAT8,
    PLAIN,
    TYPES,
    Narrow,
    Value,
    as_kind,
    dtype_of,
    from_numpy,
    name_of,
    to_numpy,
)
from tinygrad_nv.onnx.fusion import fuse_attentions
from tinygrad_nv.onnx.limits import budget, bytes_of, limit_call, shorten
from tinygrad_nv.onnx.matrices import fuse_dequantized
from tinygrad_nv.onnx.model import HOST_SIZE, KINDS, Graph, graph_of, opsets, read
from tinygrad_nv.onnx.replayed import Kind, Replayed
from tinygrad_nv.onnx.scope import Scope
from tinygrad_nv.tile import order
from tinygrad_nv.transforms.tracing import active

ELEMENTS = {np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind)): kind for kind in PLAIN}
# their numbers differ from call to call; those of Dropout do while training
RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial",
          "Bernoulli"}


class OnnxRunner:
    """An ONNX model that is called with a dict of inputs by name.

    `model` is a path, the bytes of a file, or a `ModelProto`. `inputs` and `outputs` are the names. Calls of
    the last `captures` kinds of inputs are captured; with 0 none is, and results are lazy Tensors. Both
    have gradients. Raises `OnnxError` for what is no model, and, when called, for inputs that do not fit and
    for ops that no function computes."""

    def __init__(self, model: str | Path | bytes | onnx.ModelProto, captures: int = 8) -> None:
        proto, directory = read(model)
        _load_operators()
        self.opsets = opsets(proto)
        with limit_call(0): graph = graph_of(proto.graph, self.opsets, directory, proto.ir_version >= 4)
        self.graph = fuse_dequantized(fuse_attentions(graph))
        self._bytes = _bytes(self.graph)
        self.captures = 0 if _is_random(self.graph) else captures
        self._captured: OrderedDict[Hashable, Callable[[Mapping[str, Any]], dict[str, Any]]] = OrderedDict()
        self._lock = threading.Lock()       # of what is captured
        self._known: set[str] = set()       # inputs whose values decide what runs

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
        if self.captures and not capturing and not active() and (key := self._key(inputs)) is not None:
            with self._lock:
                if (found := self._captured.get(key)) is not None: self._captured.move_to_end(key)
            if found is None:
                with _refuse_limits(): found = self._capture(inputs)
            if found is not None: return found(inputs)
        with _refuse_limits(): return {name: _plain(each) for name, each in self.values(inputs).items()}

    def values(self, inputs: Mapping[str, Any]) -> dict[str, Value]:
        """Computes as `__call__` does, with narrow types as they are (`elements.Narrow`)."""
        return self._lower(self._check_inputs(inputs))

    def _check_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Value]:
        """The inputs as values. Raises `OnnxError` for those that do not fit."""
        names = (*self.inputs, *self.graph.defaults)
        unknown = sorted(inputs.keys() - set(names))
        if unknown:
            raise OnnxError(f"the model has no input {shorten(unknown[0])!r}",
                            f"inputs {shorten(', '.join(names))}")
        extents: dict[str, int] = {}
        return {name: _input(name, inputs, self.graph.types[name], extents) for name in names
                if name in inputs or name not in self.graph.defaults}

    def _lower(self, given: Mapping[str, Value]) -> dict[str, Value]:
        """The outputs for inputs that fit."""
        scope = Scope(self.graph)
        scope.values.update({**self.graph.defaults, **given})
        with limit_call(self._bytes + bytes_of(given.values())):
            made = scope.run([given[name] for name in self.inputs])
            budget().check_total(made)
            return dict(zip(self.outputs, made, strict=True))

    # **** captured calls ****

    def _key(self, inputs: Mapping[str, Any]) -> Hashable:
        """Key of a capture for inputs: all that it depends on; None for inputs that are no plain tensors."""
        parts: list[Hashable] = [order.is_wanted(), Device.DEFAULT]
        for name, x in inputs.items():
            element: int | None
            if isinstance(x, np.ndarray): element, shape = ELEMENTS.get(x.dtype), x.shape
            elif type(x) is Replayed: element, shape = x.kind.element, x.kind.shape
            elif isinstance(x, Tensor) and x.dtype not in dtypes.weaks:
                element, shape = TYPES.get(x.dtype), x.shape
            elif name in self.graph.types:
                # 0 of what is no tensor
                if not (element := self.graph.types[name].tensor_type.elem_type): return None
                shape = tuple(x.shape) if isinstance(x, Tensor) else np.shape(x)
            else: return None
            if element not in PLAIN or 0 in shape: return None
            value = b""
            if name in self._known:
                value = np.asarray(to_numpy(x), onnx.helper.tensor_dtype_to_np_dtype(element)).tobytes()
            parts.append((name, element, shape, value))
        return tuple(parts)

    def _capture(self, inputs: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]] | None:
        """The launches for inputs, which are kept; None where there are none to capture."""
        given = self._check_inputs(inputs)
        if not all(isinstance(each, Tensor) for each in given.values()): return None
        kinds = {name: Kind.of(each) for name, each in given.items() if isinstance(each, Tensor)}
        while True:
            known = {name: np.asarray(to_numpy(given[name])) for name in self._known & kinds.keys()}
            open_ = {name: kind for name, kind in kinds.items() if name not in known}
            try: made = capture(self._lower, open_, known)
            except NotCaptured: break
            except ValueNeeded as needed:
                if any(kinds[name].size > HOST_SIZE for name in needed.names): break
                self._known.update(needed.names)
                continue
            with self._lock:
                self._captured[self._key(inputs)] = made
                if len(self._captured) > self.captures: self._captured.popitem(last=False)
            return made
        self.captures = 0
        return None


def _bytes(graph: Graph) -> int:
    """Bytes of the constants of a graph, and of the graphs of its nodes."""
    total = bytes_of([*graph.constants.values(), *graph.defaults.values()])
    for node in graph.nodes:
        for each in node.attributes.values():
            if isinstance(each, np.ndarray): total += each.nbytes
            elif isinstance(each, Graph): total += _bytes(each)
    return total


def _is_random(graph: Graph) -> bool:
    """Whether a graph, or one of its nodes, draws random numbers."""
    return any(node.op in RANDOM or (node.op == "Dropout" and len(node.inputs) > 2)
               or any(_is_random(each) for each in node.attributes.values() if isinstance(each, Graph))
               for node in graph.nodes)


@contextmanager
def _refuse_limits() -> Iterator[None]:
    """Turns, within, an error of a graph that is too large, or too deep, into an `OnnxError`."""
    try: yield
    except NVError: raise
    except (MemoryError, OSError, OverflowError, RecursionError) as error:
        raise OnnxError(f"the graph of a call cannot be run: {type(error).__name__}: {shorten(str(error))}",
                        "a graph that this machine has room for", "export a smaller model") from error


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
        raise OnnxError(f"no input {shorten(name)!r}", "all inputs of the model by name", "add it")
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
    if kind not in KINDS:
        raise OnnxError(f"input {shorten(name)!r} is declared with elements of type {kind}",
                        "a type of elements that ONNX has", "export the model again")
    if kind == onnx.TensorProto.STRING: return from_numpy(np.asarray(given))
    if not isinstance(given, Tensor):
        array = given if isinstance(given, np.ndarray) else np.asarray(
            given, dtype=onnx.helper.tensor_dtype_to_np_dtype(kind))
        if array.dtype != onnx.helper.tensor_dtype_to_np_dtype(kind):
            raise OnnxError(f"input {name!r} of {array.dtype}", name_of(kind).lower(), "cast it first")
        return from_numpy(array, folds=False)
    if given.dtype == dtypes.weakint or (given.dtype in dtypes.weaks and dtypes.is_float(dtype_of(kind))):
        given = given.cast(dtype_of(kind))      # a number, written without a type
    if given.dtype != dtype_of(kind) and FLOAT8.get(given.dtype) != kind:
        raise OnnxError(f"input {name!r} of {given.dtype}", f"{dtype_of(kind)} for {name_of(kind)}",
                        "cast it first")
    return as_kind(given, kind)


def _check_shape(name: str, x: Value, kind: onnx.TypeProto.Tensor, extents: dict[str, int]) -> None:
    """Compares an input's shape with the model's."""
    if not kind.HasField("shape"): return
    assert isinstance(x, Tensor | Narrow | np.ndarray)
    found = tuple((x.tensor if isinstance(x, Narrow) else x).shape)
    # exporters write -1 and 0 for extents that are free
    wanted = [each.dim_value if each.dim_value > 0 else
              extents.get(each.dim_param, each.dim_param or "any") for each in kind.shape.dim]
    if len(found) != len(wanted) or any(isinstance(n, int) and n != m
                                        for n, m in zip(wanted, found, strict=True)):
        raise OnnxError(f"input {name!r} of shape {found}", f"({', '.join(map(str, wanted))})")
    extents |= {n: int(m) for n, m in zip(wanted, found, strict=True) if isinstance(n, str) and n != "any"}
