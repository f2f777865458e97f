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
    """Whether an array is like extents: a few numbers."""
    return isinstance(x, np.ndarray | np.generic) and x.size <= HOST_SIZE and numeric(x)


def _small_constant(node: Node) -> np.ndarray | None:
    """A Constant's value, if it is small."""
    name, value = next(iter(node.attributes.items()))
    if name == "value": return value if _small(value) else None
    if name in ("value_int", "value_ints"): return np.array(value, dtype=np.int64)
    if name in ("value_float", "value_floats"): return np.array(value, dtype=np.float32)
    return None


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integers are divided towards zero."""
    if a.dtype.kind not in "iu": return np.asarray(a / b, dtype=a.dtype)
    return np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)), dtype=a.dtype)


def _remainder(a: np.ndarray, b: np.ndarray, fmod: int = 0) -> np.ndarray | None:
    """The remainder with b's sign, or a's."""
    return None if (b == 0).any() else np.asarray(np.fmod(a, b) if fmod else np.mod(a, b))


def _cast(x: np.ndarray, to: int, **_: Any) -> np.ndarray | None:
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(to))
    return x.astype(dtype) if dtype.kind in "biuf" else None


def _gather(x: np.ndarray, indices: np.ndarray, axis: int = 0) -> np.ndarray:
    return np.asarray(np.take(x, np.asarray(indices, dtype=np.int64), axis=axis))


def _axes(x: np.ndarray, given: Any) -> tuple[int, ...]:
    """Places of dimensions; all if none are given."""
    if given is None: return tuple(range(x.ndim))
    return tuple(int(each) % max(x.ndim, 1) for each in np.ravel(given))


def _slice(x: np.ndarray, *given: np.ndarray | None, **old: Any) -> np.ndarray:
    """Slice by inputs or, before opset 10, by attributes."""
    starts, ends, axes, steps = (*given, *[None] * 4)[:4] if given else (
        old["starts"], old["ends"], old.get("axes"), None)
    assert starts is not None
    assert ends is not None
    cut: list[slice] = [slice(None)] * x.ndim
    for i, axis in enumerate(range(len(starts)) if axes is None else _axes(x, axes)):
        step, first, last = 1 if steps is None else int(steps[i]), int(starts[i]), int(ends[i])
        # an end before the first element, which -1 does not say
        cut[axis] = slice(first, None if step < 0 and last < -x.shape[axis] else last, step)
    return np.ascontiguousarray(x[tuple(cut)])


def _squeeze(x: np.ndarray, *given: np.ndarray | None, axes: Any = None) -> np.ndarray:
    places = axes if not given or given[0] is None else given[0]
    return np.squeeze(x, None if places is None else _axes(x, places))


def _unsqueeze(x: np.ndarray, *given: np.ndarray, axes: Any = None) -> np.ndarray:
    return np.expand_dims(x, tuple(int(each) for each in np.ravel(given[0] if given else axes)))


def _reshape(x: np.ndarray, *given: np.ndarray, shape: Any = None, allowzero: int = 0) -> np.ndarray:
    extents = [int(n) for n in np.ravel(given[0] if given else shape)]
    if not allowzero: extents = [n or x.shape[i] for i, n in enumerate(extents)]
    return x.reshape(extents)


def _fill(shape: np.ndarray, value: np.ndarray | None = None) -> np.ndarray | None:
    """A few equal numbers, as expand's extents begin."""
    if int(np.prod(shape)) > 16: return None
    return np.full(tuple(map(int, shape)), 0.0 if value is None else value.reshape(-1)[0],
                   dtype=np.float32 if value is None else value.dtype)


def _expand(x: np.ndarray, shape: np.ndarray) -> np.ndarray | None:
    """x broadcast, if that is small."""
    extents = np.broadcast_shapes(x.shape, tuple(map(int, shape)))
    return np.broadcast_to(x, extents).copy() if int(np.prod(extents)) <= HOST_SIZE else None


def _range(*given: np.ndarray) -> np.ndarray | None:
    """Integers from the first on, if they are few."""
    if any(each.dtype.kind != "i" for each in given): return None
    whole = range(*(int(each.item()) for each in given))
    return np.array(whole, dtype=given[0].dtype) if len(whole) <= HOST_SIZE else None


def _reduction(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    def reduce(x: np.ndarray, *given: np.ndarray | None, axes: Any = None, keepdims: int = 1,
               noop_with_empty_axes: int = 0) -> np.ndarray:
        places = axes if not given or given[0] is None else given[0]
        if places is not None and not np.size(places): places = None
        if places is None and noop_with_empty_axes: return x
        return np.asarray(function(x, axis=_axes(x, places), keepdims=bool(keepdims)), dtype=x.dtype)
    return reduce


def _every(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    def combine(*inputs: np.ndarray) -> np.ndarray:
        made = inputs[0]
        for each in inputs[1:]: made = function(made, each)
        return np.asarray(made)
    return combine


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Identity": lambda x: x, "Cast": _cast, "Gather": _gather, "Slice": _slice, "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze, "Reshape": _reshape, "ConstantOfShape": _fill, "Expand": _expand,
    "Range": _range, "Transpose": lambda x, perm=None: np.ascontiguousarray(np.transpose(x, perm)),
    "Tile": lambda x, repeats: np.tile(x, repeats) if x.size * np.prod(repeats) <= HOST_SIZE else None,
    "Flatten": lambda x, axis=1: x.reshape(int(np.prod(x.shape[:axis])), -1), "Mod": _remainder,
    "Concat": lambda *inputs, axis: np.concatenate(inputs, axis=axis),
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": _divide, "Neg": np.negative, "Abs": np.abs,
    "Sqrt": np.sqrt, "Floor": np.floor, "Ceil": np.ceil, "Not": np.logical_not, "And": np.logical_and,
    "Or": np.logical_or, "Equal": np.equal, "Less": np.less, "Greater": np.greater,
    "LessOrEqual": np.less_equal, "GreaterOrEqual": np.greater_equal, "Where": np.where,
    "Min": _every(np.minimum), "Max": _every(np.maximum),
    "ReduceProd": _reduction(np.prod), "ReduceSum": _reduction(np.sum), "ReduceMax": _reduction(np.max),
    "ReduceMin": _reduction(np.min)}
