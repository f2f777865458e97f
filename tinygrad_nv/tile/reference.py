"""References of all specs, in plain tinygrad, to which every template is held.

Protocol. `tile/<family>/reference.py` has two functions of a spec:

    arguments(spec)                     the kernel's pointers in the order of tile/kernel.py, without scratch:
                                        each an `Argument`, with the `Place`s of its storage that are used
    reference(spec, given, exact)       the results, in the order of the arguments that are results, each with
                                        the extents of its place; `given` are flat storages by name

A reference rounds as the spec says: sums of float32 (int32), each node of an expression to its dtype. `exact`
computes in float64 and rounds nothing. tinygrad's own kernels lose roundings to floats of 8 bits, and the
numbers below 2⁻⁶ of e4m3: these are float32 numbers here, looked up and rounded by hand. Of a symbolic spec
it is that of the most there can be; `replace` the extents of the spec to have it of fewer. TABLE.arguments
and TABLE.reference (template.py) find the family's. A reference is realised under `hooks.disabled()`, or
kernels of ours may compute it.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes
from tinygrad.uop.ops import Ops

from tinygrad_nv.tile.expression import (
    FLOATS,
    Apply,
    Constant,
    Expression,
    Load,
    Position,
    Sum,
    loads,
    walk,
)
from tinygrad_nv.tile.operations import OPERATIONS

FP8 = (dtypes.fp8e4m3, dtypes.fp8e5m2)
Given = Mapping[str, Tensor]
Results = tuple[Tensor, ...]
Axis = str | int
Role = Literal["in", "out", "inout"]


@dataclass(frozen=True)
class Place:
    """Elements of a storage: element (i, j, …) lies at offset + Σ strides · (i, j, …)."""
    offset: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements of the storage, up to the last of these."""
        return self.offset + sum((e - 1) * s for e, s in zip(self.extents, self.strides, strict=True)) + 1


def dense(*extents: int) -> Place:
    """A whole storage in rows."""
    strides, step = [], 1
    for extent in reversed(extents):
        strides.append(step)
        step *= extent
    return Place(0, extents, tuple(strides[::-1]))


@dataclass(frozen=True)
class Argument:
    """A pointer of a kernel. "inout": written in place, and what is not written stays. `values`: the integers
    that may lie there, of numbers that the kernel takes for places; `usual`: those of a usual launch, one
    after the other and from the first again."""
    name: str
    dtype: DType
    places: tuple[Place, ...]
    role: Role = "in"
    values: range | None = None
    usual: Sequence[int] | None = None

    @property
    def size(self) -> int:
        """Elements of the storage."""
        return max(place.size for place in self.places)


def parameters(extents: tuple[int, ...], *roots: Expression) -> tuple[Argument, ...]:
    """The arguments x0, x1, … of expressions, over [*batch, m, n]."""
    found: dict[int, Argument] = {}
    for load in dict.fromkeys(load for root in roots for load in loads(root)):
        strides = (*(load.batch or (0,) * (len(extents) - 2)), load.m, load.n)
        before = found[load.parameter].places if load.parameter in found else ()
        found[load.parameter] = Argument(f"x{load.parameter}", load.dtype,
                                         (*before, Place(load.offset, extents, strides)))
    return tuple(found[number] for number in sorted(found))


def axes(extents: Sequence[int]) -> list[Tensor]:
    """int32 indices along each dimension, to be broadcast."""
    count = len(extents)
    return [Tensor.arange(extent).reshape([extent if i == axis else 1 for i in range(count)])
            for axis, extent in enumerate(extents)]


def gather(storage: Tensor, place: Place) -> Tensor:
    """The elements of a place, [*extents]."""
    return elements(storage, index_of(place, axes(place.extents)).expand(place.extents))


def elements(storage: Tensor, index: Tensor) -> Tensor:
    """The elements at an index; of 8-bit floats, as float32."""
    if storage.dtype not in FP8: return storage[index]
    table = Tensor([_eight(code, storage.dtype) for code in range(256)], dtype=dtypes.float32)
    return table.to(storage.device)[storage.bitcast(dtypes.uint8)[index].cast(dtypes.int32)]


def _eight(code: int, dtype: DType) -> float:
    """The number of a code of 8 bits (OCP 8-bit floating point specification, 5.3)."""
    mantissa, smallest, largest = FLOATS[dtype]
    exponent, fraction = code % 128 >> mantissa, code % (1 << mantissa)
    if exponent: fraction += 1 << mantissa
    value = math.ldexp(fraction, max(exponent, 1) - 1 + smallest - mantissa)
    if value > largest: value = math.nan if code % (1 << mantissa) or dtype == dtypes.fp8e4m3 else math.inf
    return -value if code >= 128 else value


def round_to(x: Tensor, dtype: DType) -> Tensor:
    """x of another dtype; of 8-bit floats the nearest, ties to even, what is too large the largest, as
    float32. Contiguous: tinygrad leaves out a cast to float16 and back within a kernel."""
    if dtype not in FP8: return x.cast(dtype).contiguous()
    mantissa, smallest, largest = FLOATS[dtype]
    x = x.cast(dtypes.float32)
    exponent = ((x.bitcast(dtypes.int32) >> 23) & 0xFF).maximum(smallest + 127) - mantissa
    step = (exponent << 23).bitcast(dtypes.float32)
    return ((x / step).round() * step).clip(-largest, largest)


def index_of(place: Place, at: Sequence[Tensor]) -> Tensor:
    """Returns where the elements at these indices lie."""
    steps = [index * stride for index, stride in zip(at, place.strides, strict=True) if stride]
    return sum(steps[1:], steps[0] + place.offset) if steps else at[0] * 0 + place.offset


def compute_dtype(dtype: DType, exact: bool) -> DType:
    """Returns the dtype in which numbers of a dtype are computed: float64 where nothing is rounded."""
    if exact and dtypes.is_float(dtype): return dtypes.float64
    return dtypes.float32 if dtype in FP8 else dtype


def evaluate(root: Expression, extents: tuple[int, ...], sums: Sequence[Tensor], given: Given, exact: bool,
              at: Mapping[Axis, Tensor] | None = None) -> Tensor:
    """An expression over [*batch, m, n]. `at`: what positions are that are not those of the extents, where
    nothing is loaded from."""
    own: dict[Axis, Tensor] = dict(zip((*range(len(extents) - 2), "m", "n"), axes(extents), strict=True))
    whole = own | dict(at or {})
    made: dict[Expression, Tensor] = {}
    for node in walk(root):
        kind = compute_dtype(node.dtype, exact)
        if isinstance(node, Sum): found = sums[node.part]
        elif isinstance(node, Constant): found = Tensor(node.value, dtype=kind)
        elif isinstance(node, Position): found = whole[node.axis].cast(kind)
        elif isinstance(node, Load): found = _load(node, own, given, extents).cast(kind)
        else:
            assert isinstance(node, Apply)
            found = _apply(node, [made[arg] for arg in node.args], exact)
        made[node] = found.expand(extents)
    return made[root]


def _load(load: Load, whole: Mapping[Axis, Tensor], given: Given, extents: tuple[int, ...]) -> Tensor:
    batch = len(extents) - 2
    place = Place(load.offset, extents, (*(load.batch or (0,) * batch), load.m, load.n))
    index = index_of(place, [whole[axis] for axis in (*range(batch), "m", "n")])
    return elements(given[f"x{load.parameter}"], index)


def _apply(node: Apply, args: list[Tensor], exact: bool) -> Tensor:
    if node.op == "cast":
        wide = exact and dtypes.is_float(node.dtype)
        return args[0].cast(dtypes.float64) if wide else round_to(args[0], node.dtype)
    if node.op == "div": return _quotient(args[0], args[1])
    if node.op == "round": return args[0].round()
    if node.op == "min": return (args[1] < args[0]).where(args[1], args[0])
    return args[0].alu(Ops[OPERATIONS[node.op].graph], *args[1:])


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    """x / y rounded to x's dtype: tinygrad multiplies by a reciprocal."""
    return (x.cast(dtypes.float64) / y.cast(dtypes.float64)).cast(x.dtype)
