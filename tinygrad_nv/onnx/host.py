"""Shape arithmetic, without a device.

Protocol: exporters compute extents in the graph (Shape → Gather → Concat → Reshape). `on_host(node, inputs)`
is the output of such a node as a numpy array when all of its inputs are small arrays that the host knows, and
None when the node is the device's. A Tensor's shape is known to the host, so these chains cost no kernel.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import helper
from tinygrad import Tensor

from tinygrad_nv.onnx.elements import Narrow, Value, numeric
from tinygrad_nv.onnx.model import HOST_SIZE, Node


def on_host(node: Node, inputs: Sequence[Value]) -> np.ndarray | None:
    """The output of a node of extents, None where the device computes it."""
    if node.domain: return None
    if node.op in ("Shape", "Size") and (shape := _shape(inputs[0])) is not None:
        if node.op == "Size": return np.array(int(np.prod(shape, dtype=np.int64)), dtype=np.int64)
        return np.array(shape[node.attributes.get("start", 0):node.attributes.get("end")], dtype=np.int64)
    if node.op == "Constant": return _small_constant(node)
    function = FUNCTIONS.get(node.op)
    if function is None or not inputs or not all(each is None or _small(each) for each in inputs): return None
    made = function(*inputs, **node.attributes)
    return np.asarray(made) if made is not None and _small(made) else None


def _shape(x: Value) -> tuple[int, ...] | None:
    if isinstance(x, Narrow): return _shape(x.tensor)
    if isinstance(x, np.ndarray): return x.shape
    if isinstance(x, Tensor) and all(isinstance(n, int) for n in x.shape): return tuple(map(int, x.shape))
    return None


def _small(x: Any) -> bool:
    """Whether an array is like extents: a few numbers in a row."""
    return isinstance(x, np.ndarray | np.generic) and x.ndim <= 1 and x.size <= HOST_SIZE and numeric(x)


def _small_constant(node: Node) -> np.ndarray | None:
    """A Constant's value, if it is small."""
    name, value = next(iter(node.attributes.items()))
    if name == "value": return value if _small(value) else None
    if name in ("value_int", "value_ints"): return np.array(value, dtype=np.int64)
    if name in ("value_float", "value_floats"): return np.array(value, dtype=np.float32)
    return None


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integers are divided towards zero."""
    if a.dtype.kind not in "iu": return np.asarray(a / b, dtype=a.dtype)
    return np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)), dtype=a.dtype)


def _cast(x: np.ndarray, to: int, **_: Any) -> np.ndarray | None:
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(to))
    return x.astype(dtype) if dtype.kind in "biuf" else None


def _gather(x: np.ndarray, indices: np.ndarray, axis: int = 0) -> np.ndarray:
    return np.asarray(np.take(x, np.asarray(indices, dtype=np.int64), axis=axis))


def _slice(x: np.ndarray, *given: np.ndarray, **old: Any) -> np.ndarray:
    """Slice of one dimension, by inputs or, before opset 10, by attributes."""
    starts, ends = (given[0], given[1]) if given else (old["starts"], old["ends"])
    steps = given[3] if len(given) > 3 and given[3] is not None else [1]
    return x[slice(int(starts[0]), int(ends[0]), int(steps[0]))] if len(starts) == 1 else x


def _squeezed(x: np.ndarray, *_: Any, **__: Any) -> np.ndarray: return x.reshape(()) if x.size == 1 else x


def _unsqueezed(x: np.ndarray, *axes: np.ndarray, **old: Any) -> np.ndarray | None:
    number = np.size(axes[0] if axes else old["axes"])
    return x.reshape(1) if x.ndim == 0 and number == 1 else None


def _reshaped(x: np.ndarray, shape: np.ndarray, **_: Any) -> np.ndarray | None:
    return x.reshape(tuple(map(int, shape))) if 0 not in shape else None


def _filled(shape: np.ndarray, value: np.ndarray | None = None) -> np.ndarray | None:
    """A row of a few equal numbers, as expand's extents begin."""
    if shape.ndim != 1 or shape.size != 1 or shape[0] > 16: return None
    return np.full(tuple(map(int, shape)), 0.0 if value is None else value.reshape(-1)[0],
                   dtype=np.float32 if value is None else value.dtype)


def _reduced(function: Callable[..., Any]) -> Callable[..., np.ndarray | None]:
    def called(x: np.ndarray, *axes: np.ndarray, keepdims: int = 1, **_: Any) -> np.ndarray | None:
        return np.asarray(function(x, keepdims=bool(keepdims)), dtype=x.dtype) if x.ndim == 1 else None
    return called


def _every(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    def called(*inputs: np.ndarray) -> np.ndarray:
        made = inputs[0]
        for each in inputs[1:]: made = function(made, each)
        return np.asarray(made)
    return called


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Identity": lambda x: x, "Cast": _cast, "Gather": _gather, "Slice": _slice, "Squeeze": _squeezed,
    "Unsqueeze": _unsqueezed, "Reshape": _reshaped, "ConstantOfShape": _filled,
    "Concat": lambda *inputs, axis: np.concatenate(inputs, axis=axis),
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": _divided, "Neg": np.negative, "Abs": np.abs,
    "Sqrt": np.sqrt, "Floor": np.floor, "Ceil": np.ceil, "Not": np.logical_not, "And": np.logical_and,
    "Or": np.logical_or, "Equal": np.equal, "Less": np.less, "Greater": np.greater,
    "LessOrEqual": np.less_equal, "GreaterOrEqual": np.greater_equal, "Where": np.where,
    "Min": _every(np.minimum), "Max": _every(np.maximum),
    "ReduceProd": _reduced(np.prod), "ReduceSum": _reduced(np.sum), "ReduceMax": _reduced(np.max),
    "ReduceMin": _reduced(np.min)}
