"""If, Loop, Scan, sequences and optionals.

Protocol: a condition and a number of iterations are read from their Tensors, so that only the graph that is
taken is evaluated; a scan's number of iterations is an extent, which needs no value.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import OnnxError
from tinygrad_nv.onnx.elements import Narrow, Value, as_kind, dtype_of, from_numpy, like, name_of, plain
from tinygrad_nv.onnx.limits import budget
from tinygrad_nv.onnx.model import Graph
from tinygrad_nv.onnx.table import Call, op


def tensor(x: Value) -> Tensor:
    """A value that must be a Tensor of a type that tinygrad has. Raises `OnnxError`."""
    if isinstance(x, Narrow): raise OnnxError(f"elements of type {name_of(x.kind)}", "a Cast before it")
    return plain(x)


def number(x: Value) -> Any:
    """The one element of a value."""
    return x.item() if isinstance(x, np.ndarray) else tensor(x).item()


@op("If", raw=True, call=True)
def if_(call: Call, condition: Value, then_branch: Graph, else_branch: Graph) -> tuple[Value, ...]:
    """One of two graphs."""
    return tuple(call.evaluate(then_branch if number(condition) else else_branch, []))


@op("Loop", raw=True, call=True)
def loop(call: Call, most: Value, condition: Value, *state: Value, body: Graph) -> tuple[Value, ...]:
    """A graph that is evaluated until its condition is false, or so often."""
    trips = None if most is None else int(number(most))
    going, carried = condition is None or bool(number(condition)), list(state)
    rows: list[list[Value]] = [[] for _ in body.outputs[1 + len(state):]]
    i, left, endless, nodes = 0, budget(), _stays_true(body), len(body.nodes) + 1
    while going and (trips is None or i < trips):
        remaining = None if trips is None else trips - i
        if endless: left.expect(remaining, nodes)
        elif not left.fits(remaining, nodes): left.iterate()
        before = left.spent
        keep, *made = call.evaluate(body, [np.array(i, dtype=np.int64), np.array(going), *carried])
        nodes = left.spent - before     # with those of loops inside
        going, carried = bool(number(keep)), made[:len(state)]
        for row, each in zip(rows, made[len(state):], strict=True): row.append(each)
        i += 1
    names = body.outputs[1 + len(state):]
    return (*carried, *(_stack(row, 0, body.types.get(name))
                        for name, row in zip(names, rows, strict=True)))


def _stays_true(body: Graph) -> bool:
    """Whether a loop's condition is the one that it began with, or a true constant: nothing but the number of
    trips ends it."""
    writers = {name: node for node in body.nodes for name in node.outputs}
    name = body.outputs[0] if body.outputs else ""
    while (node := writers.get(name)) is not None and node.op in ("Identity", "Cast"): name = node.inputs[0]
    if node is not None:
        return node.op == "Constant" and bool(np.all(node.attributes.get("value", False)))
    return name == (body.inputs[1] if len(body.inputs) > 1 else "") or (
        isinstance(value := body.constants.get(name), np.ndarray) and bool(value.all()))


def _stack(rows: list[Value], axis: int, kind: onnx.TypeProto | None = None) -> Value:
    """Stacks the results of iterations along a new dimension. Of none it is empty, if the type says how each
    would be."""
    if not rows and kind is not None and kind.tensor_type.HasField("shape"):
        dims = [each.dim_value if each.HasField("dim_value") else None for each in kind.tensor_type.shape.dim]
        if None not in dims:
            dims.insert(axis, 0)
            number = kind.tensor_type.elem_type
            return as_kind(Tensor.zeros(*dims, dtype=dtype_of(number)), number)
    if not rows: raise OnnxError("no iteration, so that the shape of what it makes is unknown",
                                 "at least one iteration of a graph with scan outputs")
    return like(Tensor.stack(*map(plain, rows), dim=axis), rows[0])


@op("Scan", since=9, raw=True, call=True)
def scan(call: Call, *inputs: Value, body: Graph, num_scan_inputs: int, scan_input_axes: Sequence[int] = (),
         scan_input_directions: Sequence[int] = (), scan_output_axes: Sequence[int] = (),
         scan_output_directions: Sequence[int] = ()) -> tuple[Value, ...]:
    """A graph that is evaluated for each element along a dimension of its inputs."""
    states = list(inputs[:len(inputs) - num_scan_inputs])
    whole = inputs[len(states):]
    given = [plain(each) for each in whole]
    axes = [scan_input_axes[i] if scan_input_axes else 0 for i in range(len(given))]
    if scan_input_directions:
        given = [each.flip(axes[i]) if scan_input_directions[i] else each for i, each in enumerate(given)]
    rows: list[list[Value]] = [[] for _ in body.outputs[len(states):]]
    steps = int(given[0].shape[axes[0]])
    budget().expect(steps, len(body.nodes) + 1)
    for i in range(steps):
        slices = [like(each[(slice(None),) * (axis % each.ndim) + (i,)], its)
                  for axis, each, its in zip(axes, given, whole, strict=True)]
        made = call.evaluate(body, [*states, *slices])
        states = made[:len(states)]
        for row, each in zip(rows, made[len(states):], strict=True): row.append(each)
    made = []
    for i, row in enumerate(rows):
        backwards = bool(scan_output_directions) and bool(scan_output_directions[i])
        made.append(_stack(row[::-1] if backwards else row, scan_output_axes[i] if scan_output_axes else 0))
    return (*states, *made)


@op("Scan", since=8, raw=True, call=True)
def scan_8(call: Call, lengths: Value, *inputs: Value, body: Graph, num_scan_inputs: int,
           directions: Sequence[int] = ()) -> tuple[Value, ...]:
    """The first version: a scan for each element of a batch."""
    if lengths is not None: raise OnnxError("sequence_lens of Scan", "whole sequences", "export with opset 9")
    batch = int(plain(inputs[0]).shape[0])
    made = [scan(call, *(like(plain(each)[i], each) for each in inputs), body=body,
                 num_scan_inputs=num_scan_inputs, scan_input_directions=directions) for i in range(batch)]
    return tuple(_stack(list(each), 0) for each in zip(*made, strict=True))


# **** sequences ****

@op("SequenceConstruct", raw=True)
def construct(*inputs: Value) -> list[Value]: return list(inputs)


@op("SequenceEmpty", raw=True)
def empty(dtype: int = 1) -> list[Value]:
    dtype_of(dtype)     # raises for a type that no Tensor has
    return []


@op("SequenceLength", raw=True)
def length(sequence: list[Value]) -> np.ndarray: return np.array(len(sequence), dtype=np.int64)


@op("SequenceAt", raw=True)
def at(sequence: list[Value], position: Value) -> Value: return sequence[int(number(position))]


@op("SequenceErase", raw=True)
def erase(sequence: list[Value], position: Value = None) -> list[Value]:
    i = -1 if position is None else int(number(position))
    return [each for j, each in enumerate(sequence) if j != i % len(sequence)]


@op("SequenceInsert", raw=True)
def insert(sequence: list[Value], value: Value, position: Value = None) -> list[Value]:
    i = len(sequence) if position is None else int(number(position))
    made = list(sequence)
    made.insert(i, value)
    return made


@op("ConcatFromSequence", raw=True)
def join(sequence: list[Value], axis: int, new_axis: int = 0) -> Value:
    if not sequence: raise OnnxError("an empty sequence", "at least one tensor")
    given = list(map(plain, sequence))
    return like((Tensor.stack if new_axis else Tensor.cat)(*given, dim=axis), sequence[0])


@op("SplitToSequence", raw=True)
def split(x: Value, lengths: Value = None, axis: int = 0, keepdims: int = 1) -> list[Value]:
    """Parts of given lengths, or of length 1, which may be without the dimension."""
    whole = plain(x)
    if lengths is None:
        budget().expect(int(whole.shape[axis]), 1)
        parts = [each if keepdims else each.squeeze(axis) for each in whole.split(1, axis)]
    else:
        known = lengths if isinstance(lengths, np.ndarray) else tensor(lengths).numpy()
        parts = list(whole.split(int(known) if known.ndim == 0 else known.tolist(), axis))
    return [like(each, x) for each in parts]


# **** optionals ****

@op("Optional", raw=True)
def optional(value: Value = None, type: object = None) -> Value: return value


@op("OptionalHasElement", raw=True)
def has_element(value: Value = None) -> np.ndarray: return np.array(value is not None)


@op("OptionalGetElement", raw=True)
def get_element(value: Value) -> Value:
    if value is None: raise OnnxError("an optional without a value", "a value", "test OptionalHasElement")
    return value


@op("Identity", raw=True)
def identity(value: Value) -> Value: return value


@op("Constant", raw=True)
def constant(value: np.ndarray | None = None, sparse_value: np.ndarray | None = None,
             value_float: float | None = None, value_floats: Sequence[float] | None = None,
             value_int: int | None = None, value_ints: Sequence[int] | None = None,
             value_string: str | None = None, value_strings: Sequence[str] | None = None) -> Value:
    """The one attribute that is given."""
    for given in (value, sparse_value):
        if given is not None: return from_numpy(given)
    for one, several, dtype in ((value_float, value_floats, np.float32), (value_int, value_ints, np.int64)):
        if one is not None: return np.array(one, dtype=dtype)
        if several is not None: return np.array(several, dtype=dtype)
    return np.array(value_string if value_strings is None else value_strings, dtype=object)


@op("ConstantOfShape", host=(0,))
def constant_of_shape(shape: np.ndarray, value: Tensor | Narrow | None = None) -> Value:
    """A Tensor of equal elements."""
    made = Tensor(0.0, dtype=dtypes.float32) if value is None else plain(value).reshape(())
    return like(made.expand(tuple(map(int, shape))) if shape.size else made, value)
