"""Matmuls and table look-ups among reductions.

Protocol. tinygrad writes a matmul as the sum of a broadcast product over leading dimensions. Each dimension
of the product is in one operand or in both, and is summed or kept: kept in one it is M or N, kept in both
batch, summed in both K. `matmul` finds that, and `emit_matmul` writes Transpose, Reshape, MatMul, Reshape,
Transpose, of which those that change nothing are left out.

`weight[tokens]` is the sum of weight where tokens equal 0, 1, … over rows: `look_up` finds that, for Gather.

An operand is a `Placed` value: repetition and order of its dimensions are taken off it, what is left is in
`dims`, the dimension of the product for each of its own.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from tinygrad import dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.onnx.exporting.builder import Builder


@dataclass(frozen=True)
class Placed:
    """A value inside of a product of dimensions."""
    node: UOp
    places: tuple[int, ...]

    @property
    def shape(self) -> list[int]: return list(map(int, self.node.shape))

    @property
    def dims(self) -> list[int]:
        """The dimensions of the product along which it differs, in its own order."""
        return [d for d, n in zip(self.places, self.shape, strict=True) if n != 1]


@dataclass(frozen=True)
class Sum:
    """A sum: of what, over which dimensions of it, and the order of the others in the result."""
    source: UOp
    summed: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]: return tuple(map(int, self.source.shape))


@dataclass(frozen=True)
class Matmul:
    """The operands of a matmul, and the dtype in which it is summed."""
    a: Placed
    b: Placed
    dtype: DType
    sum: Sum


@dataclass(frozen=True)
class LookUp:
    """Rows of a table by numbers, which count dimension `rows` of the product."""
    table: Placed
    indices: Placed
    rows: int
    sum: Sum


def place_source(node: UOp, rank: int) -> Placed:
    """A source of a product of so many dimensions, without EXPAND and PERMUTE."""
    places = [rank - len(node.shape) + i for i in range(len(node.shape))]
    while node.op in (Ops.PERMUTE, Ops.EXPAND):
        if node.op is Ops.EXPAND: places = places[len(node.shape) - len(node.src[0].shape):]
        else: places = [places[node.arg.index(i)] for i in range(len(places))]
        node = node.src[0]
    return Placed(node, tuple(places))


def sum_of(node: UOp) -> Sum | None:
    """A REDUCE of sums, with the order of dimensions before it."""
    if node.op is not Ops.REDUCE or node.arg[0] is not Ops.ADD: return None
    number, source = node.arg[1], node.src[0]
    order = tuple(range(len(source.shape)))
    if source.op is Ops.PERMUTE: order, source = tuple(source.arg), source.src[0]
    return Sum(source, order[:number], order[number:])


def matmul(node: UOp) -> Matmul | None:
    """A REDUCE as a matmul. Halves that are multiplied and then summed in float32 are multiplied in it."""
    if (found := sum_of(node)) is None: return None
    source = found.source
    if source.op is Ops.CAST and dtypes.is_float(source.dtype) and dtypes.is_float(source.src[0].dtype):
        source = source.src[0]
    if source.op is not Ops.MUL or not dtypes.is_float(source.dtype): return None
    a, b = (place_source(each, len(found.shape)) for each in source.src)
    both = {*a.dims} & {*b.dims}
    summed = {d for d in found.summed if found.shape[d] != 1}
    # a dimension that one of them lacks is summed before; a product of equal dimensions is no matmul
    if not summed or not summed <= both or {*a.dims} == {*b.dims} == summed | both: return None
    return Matmul(a, b, node.dtype, found)


def emit_matmul(b: Builder, found: Matmul, names: Sequence[str]) -> str:
    """Adds a matmul of operands whose names are given."""
    in_a, in_b, shape = {*found.a.dims}, {*found.b.dims}, found.sum.shape
    batch = [d for d in found.sum.kept if d in in_a and d in in_b]
    m, n = ([d for d in found.sum.kept if d in own] for own in (in_a - in_b, in_b - in_a))
    k = [d for d in found.sum.summed if d in in_a]
    extents = [shape[d] for d in batch]

    def size(dims: Sequence[int]) -> int: return prod(shape[d] for d in dims)
    left = lay_out(b, names[0], found.a, shape, [*batch, *m, *k])
    left = reshape(b, left, [shape[d] for d in (*batch, *m, *k)], [*extents, size(m), size(k)])
    right = lay_out(b, names[1], found.b, shape, [*batch, *k, *n])
    right = reshape(b, right, [shape[d] for d in (*batch, *k, *n)], [*extents, size(k), size(n)])
    made = b.node("MatMul", left, right)
    return order_dims(b, made, [*extents, size(m), size(n)], [*batch, *m, *n], found.sum)


def lay_out(b: Builder, name: str, operand: Placed, shape: Sequence[int], order: Sequence[int]) -> str:
    """An operand with those of its dimensions along which it differs, in an order."""
    flat = reshape(b, name, operand.shape, [shape[d] for d in operand.dims])
    return transpose(b, flat, [operand.dims.index(d) for d in order])


def order_dims(b: Builder, name: str, have: Sequence[int], order: Sequence[int], total: Sum) -> str:
    """A result of dimensions in an order as the sum has them; it has those of extent 1 too."""
    every = [*order, *(d for d in total.kept if d not in order)]
    made = reshape(b, name, have, [total.shape[d] for d in every])
    return transpose(b, made, [every.index(d) for d in total.kept])


def reshape(b: Builder, name: str, old: Sequence[int], new: Sequence[int]) -> str:
    """A Reshape, if the shape changes."""
    return name if list(old) == list(new) else b.node("Reshape", name, b.integers(*new))


def transpose(b: Builder, name: str, order: Sequence[int]) -> str:
    """A Transpose, if the order changes."""
    return name if list(order) == sorted(order) else b.node("Transpose", name, perm=list(order))


# **** tables ****

def look_up(node: UOp, known: Callable[[UOp], np.ndarray | None]) -> LookUp | None:
    """A REDUCE as rows of a table; `known` is the value of a node that depends on no input. A number of no
    row gives 0 in tinygrad, and is an error in ONNX."""
    found = sum_of(node)
    if found is None or len(found.summed) != 1 or found.source.op is not Ops.WHERE: return None
    condition, given, other = found.source.src
    if other.op is not Ops.CONST or other.arg != 0 or (equal := _sides(condition)) is None: return None
    rank, d = len(found.shape), found.summed[0]
    table = place_source(given, rank)
    for sides in (equal, equal[::-1]):
        numbers, indices = (place_source(each, rank) for each in sides)
        if numbers.dims != [d] or d in indices.dims or d not in table.dims: continue
        if {*table.dims} & {*indices.dims} or (values := known(numbers.node)) is None: continue
        if np.array_equal(values.reshape(-1), np.arange(found.shape[d])):
            return LookUp(table, indices, d, found)
    return None


def _sides(condition: UOp) -> tuple[UOp, UOp] | None:
    """The two sides of an equality."""
    if condition.op is Ops.CMPEQ: return condition.src[0], condition.src[1]
    inner, flag = condition.src if condition.op is Ops.CMPNE else (condition, condition)
    if inner.op is not Ops.CMPNE or flag.op is not Ops.CONST or flag.arg is not True: return None
    return inner.src[0], inner.src[1]


def emit_look_up(b: Builder, found: LookUp, names: Sequence[str]) -> str:
    """Adds a Gather of a table by indices, whose names are given."""
    shape = found.sum.shape
    columns = [d for d in found.table.dims if d != found.rows]
    table = lay_out(b, names[0], found.table, shape, [found.rows, *columns])
    indices = lay_out(b, names[1], found.indices, shape, found.indices.dims)
    order = [*found.indices.dims, *columns]
    return order_dims(b, b.node("Gather", table, indices, axis=0), [shape[d] for d in order], order,
                      found.sum)
