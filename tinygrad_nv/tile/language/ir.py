"""The Tile IR: what one program (a CTA, or one step of a CPU's loop) computes with whole tiles.

Protocol. A `Program` has tensors, a grid, and a body. A value is a tile: a dtype and a static shape, () for a
scalar. Each operation makes new values (SSA); loops and branches are operations with regions, whose
arguments and yields carry what changes. Operations, with operands → results and [attributes]:

    constant            → scalar                    [value]
    program_id          → s32 scalar                [axis]
    iota                → s32 (n)                   0, 1, … n - 1
    apply        x …    → tile                      [fn]: a row of operations.LANGUAGE_OPERATIONS; operands
                                                    have one shape
    cast, bitcast x     → tile                      [dtype of the result]
    halves       x      → tile                      words of 32 bits as two of [dtype], a new last axis
    interleave   x y    → tile                      in turn along the last axis
    deinterleave x      → tile                      [odd]: every second element along the last axis
    broadcast    x      → tile                      extents of 1, and missing leading ones, are repeated
    reshape      x      → tile                      row-major order stays
    transpose    x      → tile                      [permutation]
    reduce       x …    → tile …                    [axis, fn], or a region (2 n scalars → n) that combines
    scan         x …    → tile …                    [axis, fn, reverse], or a region; inclusive
    across       x      → scalar                    [fn]: of the programs of a cluster, in their order
    gather       x i    → tile                      [axis]: x taken at i along an axis; i has the result's
                                                    shape
    sort         x      → tile                      [axis, descending]
    rank         x      → s32 (n), s32 (bins)       [bins]: elements ahead of each that are the same number of
                                                    0 … bins - 1, 0 of another; how many are each number
    dot          a b c  → tile                      [tf32]: c + a @ b; (m, k), (k, n), (m, n)
    load_block   i …    → tile                      [tensor, sizes, other]: i the first element of each axis
    store_block  i … v                              [tensor, sizes]
    load         o m x  → tile                      [tensor]: at element offsets o where m holds, else x
    store        o v m                              [tensor]
    atomic       o v m  → tile                      [tensor, fn]: the elements before
    for          a b s x … → tile …                 region (i, x …) → x …; [stages, unroll], of roles [pipe]
    while        x …    → tile …                    regions (x …) → bool and (x …) → x …
    if           c x …  → tile …                    two regions () → x …
    select       i      → scalar …                  [choices, lengths, numbers]: of lists what stands at i
    where_needed c y    → tile                      region () → x of elements: x where c holds, else y; may be
                                                    left out where no element needs it
    barrier                                         all threads of the program
    promise      x                                  [name, at, least, most, stable]: promises.py

`select` of lists of tensors makes a handle of each, which is the first index of accesses to the tensor's name
in `choices`, then how many elements the chosen ones have, then one of each list of `numbers`. Below the first
i is the first, beyond the last the last.

`sizes` has 0 for an axis that is indexed, and is not one of the tile's. A block may reach beyond the tensor:
what lies outside reads as `other` and is not stored. Offsets under a mask that does not hold are not used.
Floats are computed in float32 and rounded to their dtype after each operation; integers wrap.
"""
from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tinygrad.dtype import DType

from tinygrad_nv.tile.expression import short

if TYPE_CHECKING:
    from tinygrad_nv.tile.reference import Argument

STORES = ("store", "store_block", "atomic")     # operations that write a tensor


@dataclass(frozen=True)
class TileType:
    """Type of a value: elements, and how many along each axis."""
    dtype: DType
    shape: tuple[int, ...] = ()

    def __str__(self) -> str: return "x".join([*map(str, self.shape), short(self.dtype)])


@dataclass(frozen=True)
class Line:
    """Line where an operation was written."""
    file: str
    number: int

    def __str__(self) -> str: return f"{self.file}:{self.number}"


@dataclass(eq=False)
class Value:
    """A result of an operation, or an argument of a region."""
    type: TileType

    @property
    def dtype(self) -> DType: return self.type.dtype

    @property
    def shape(self) -> tuple[int, ...]: return self.type.shape


@dataclass(eq=False)
class Op:
    """An operation."""
    name: str
    operands: tuple[Value, ...] = ()
    results: tuple[Value, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    regions: tuple[Region, ...] = ()
    line: Line | None = None

    @property
    def result(self) -> Value:
        """The only result."""
        one, = self.results
        return one


def select_numbers(op: Op, value: Value) -> Sequence[int]:
    """Returns the numbers of which a `select` takes one as this result."""
    place, handles = op.results.index(value), len(op.attributes["choices"])
    if place < handles: return (0,)
    numbers: Sequence[int] = (op.attributes["lengths"], *op.attributes["numbers"])[place - handles]
    return numbers


@dataclass(eq=False)
class Region:
    """Operations in order, what they are given and what they give."""
    arguments: tuple[Value, ...] = ()
    ops: list[Op] = field(default_factory=list)
    yields: tuple[Value, ...] = ()

    def walk(self) -> Iterator[Op]:
        """All operations, those of regions within after their own."""
        for op in self.ops:
            yield op
            for region in op.regions: yield from region.walk()


@dataclass(frozen=True)
class TensorParameter:
    """A tensor of a program: contiguous, row-major, or as `steps` say from one index of an axis to the next,
    the last of which is 1; its elements begin at `offset`. `output`: the program writes it; `saturate` and
    `stochastic`, a seed: how stores round (rounding.py). `of`: the tensor whose memory this is a view of.
    `symbolic`: the axis of which the kernel's last integer says how many elements there are, `shape`'s at
    most. `among`: names of the tensors of which a `select` takes one: [which, elements], of the longest."""
    name: str
    dtype: DType
    shape: tuple[int, ...]
    output: bool = False
    saturate: bool = False
    stochastic: int | None = None
    steps: tuple[int, ...] | None = None
    offset: int = 0
    of: str = ""
    symbolic: int | None = None
    among: tuple[str, ...] = ()

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from one index of an axis to the next."""
        if self.steps is not None: return self.steps
        made = [1]
        for extent in reversed(self.shape[1:]): made.append(made[-1] * extent)
        return tuple(reversed(made)) if self.shape else ()

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def is_dense(self) -> bool:
        """Whether it is a whole storage in rows."""
        return not self.offset and self.strides == replace(self, steps=None).strides

    @property
    def span(self) -> int:
        """Elements from the first to the last."""
        return sum((e - 1) * s for e, s in zip(self.shape, self.strides, strict=True)) + 1

    def __str__(self) -> str:
        words = [str(TileType(self.dtype, self.shape)), *["out"] * self.output, *["saturate"] * self.saturate]
        if self.of: words.append(f"of {self.of}")
        if self.among: words.append(f"one of {' '.join(self.among)}")
        if not self.is_dense: words.append(f"at {self.offset}, steps {'x'.join(map(str, self.strides))}")
        if self.stochastic is not None: words.append(f"stochastic_round({self.stochastic})")
        if self.symbolic is not None: words.append(f"symbolic along {self.symbolic}")
        return f"{self.name}: {' '.join(words)}"


@dataclass(eq=False)
class Program:
    """A kernel in tiles, which stays as it is. `tensors`: outputs, then inputs, in the order of the kernel's
    pointers; `views` are of their memory, and read alone; of `choices` a `select` says whose. `grid` is how
    many programs there are along x, y, z. Where `rows` is not 0, the kernel's last integer is a number of
    rows, and x is one for so many of them. `cluster`: neighbours along z that may ask each other
    (`across`), on sm_90a. `promised`: the same with its promises, where it has some. `retrace` makes it of
    its function once more."""
    name: str
    tensors: tuple[TensorParameter, ...]
    grid: tuple[int, int, int]
    body: Region
    views: tuple[TensorParameter, ...] = ()
    rows: int = 0
    cluster: int = 1
    choices: tuple[TensorParameter, ...] = ()
    promised: Program | None = None
    retrace: Callable[[], Program] | None = None

    def tensor(self, name: str) -> TensorParameter:
        """The tensor, the view or the choice of a name."""
        return next(each for each in (*self.tensors, *self.views, *self.choices) if each.name == name)

    def tensor_names(self, op: Op) -> tuple[str, ...]:
        """Names of the tensors or views that an access may be to."""
        tensor = self.tensor(op.attributes["tensor"])
        return tensor.among or (tensor.name,)

    def __str__(self) -> str: return self._text

    @functools.cached_property
    def _text(self) -> str: return "\n".join(_Printer().program(self)) + "\n"

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The pointers of its kernels (tile/reference.py)."""
        from tinygrad_nv.tile.reference import Argument, Place
        places = [Place(each.offset, each.shape or (1,), each.strides or (1,)) for each in self.tensors]
        return tuple(Argument(each.name, each.dtype, (place,), "out" if each.output else "in")
                     for each, place in zip(self.tensors, places, strict=True))

    @functools.cached_property
    def key(self) -> str:
        """The same for the same program, wherever it was written."""
        return hashlib.sha256(str(self).encode()).hexdigest()


def name_values(program: Program) -> dict[Value, str]:
    """The names that values have in a program's text."""
    printer = _Printer()
    printer.program(program)
    return printer.names


class _Printer:
    """The text of a program: one line an operation, values numbered in their order."""

    def __init__(self) -> None: self.names: dict[Value, str] = {}

    def name(self, value: Value) -> str: return self.names.setdefault(value, f"%{len(self.names)}")

    def list_values(self, values: tuple[Value, ...]) -> str: return ", ".join(map(self.name, values))

    def list_types(self, values: tuple[Value, ...]) -> str:
        return ", ".join(f"{self.name(each)}: {each.type}" for each in values)

    def program(self, program: Program) -> list[str]:
        tensors = ", ".join(map(str, (*program.tensors, *program.views, *program.choices)))
        rows = f", {program.rows} rows each" if program.rows else ""
        cluster = f", clusters of {program.cluster}" if program.cluster > 1 else ""
        lines = [f"program {program.name}({tensors}) grid {'x'.join(map(str, program.grid))}{rows}{cluster}"]
        return [*lines, *self.region(program.body, "  ")]

    def region(self, region: Region, indent: str) -> list[str]:
        lines = []
        for op in region.ops:
            shown = [f"{name}={_show(value)}" for name, value in op.attributes.items()]
            left = f"{self.list_types(op.results)} = " if op.results else ""
            operands = f" {self.list_values(op.operands)}" if op.operands else ""
            lines.append(f"{indent}{left}{op.name}{operands}{' [' + ', '.join(shown) + ']' if shown else ''}")
            for inner in op.regions:
                arguments = f" ({self.list_types(inner.arguments)})" if inner.arguments else ""
                lines.append(f"{indent}  region{arguments}")
                lines += self.region(inner, indent + "    ")
        if region.yields: lines.append(f"{indent}yield {self.list_values(region.yields)}")
        return lines


def _show(value: Any) -> str:
    if isinstance(value, DType): return short(value)
    if isinstance(value, float): return value.hex() if value == value else "nan"
    if isinstance(value, tuple): return "x".join(map(_show, value)) or "()"
    return str(value)
