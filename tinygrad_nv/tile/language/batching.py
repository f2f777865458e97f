"""A program over tensors with a leading dimension of examples: what `vmap` makes of a kernel.

Protocol: `batched(program, n, names)` computes each of n examples by programs of its own, n times as many.
The tensors of `names`, and all outputs, get n in front; others are the same for all. Examples are along z of
the grid where it has one program, else each n-th part of x is one example's, and the body sees its own place.
Offsets of random numbers stay those of one example: all examples draw the same.
"""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv.errors import LanguageError
from tinygrad_nv.tile.language.ir import Op, Program, Region, TileType, Value

MOST_Z, MOST = 65535, 2**31 - 1      # programs along z; of offsets, which are 32 bits
BLOCKS, ELEMENTS = ("load_block", "store_block"), ("load", "store", "atomic")


def batch_program(program: Program, n: int, names: Collection[str]) -> Program:
    """A program for n examples. Raises `LanguageError` where offsets do not fit into 32 bits."""
    wide = {each.name for each in program.tensors if each.output or each.name in names}
    tensors = tuple(replace(each, shape=(n, *each.shape)) if each.name in wide else each
                    for each in program.tensors)
    if largest := max((each for each in tensors if each.numel > MOST), key=lambda each: each.numel,
                      default=None):
        raise LanguageError(f"vmap of kernel {program.name} over {n} examples: {largest.name} has "
                            f"{largest.numel} elements", f"at most {MOST}", "fewer examples at once")
    if program.choices:
        raise LanguageError(f"vmap of kernel {program.name}, which chooses among tensors",
                            "a kernel without tile.select", "stack the examples' tensors")
    x, y, z = program.grid
    along_z = z == 1 and n <= MOST_Z
    copy = _Copy(program, wide, along_z)
    body = Region((), [], program.body.yields)
    copy.begin(body.ops)
    copy.copy(program.body, body)
    return Program(program.name, tensors, (x, y, n) if along_z else (n * x, y, z), body)


class _Copy:
    """Copies regions. Values stay; places and addresses become those of an example."""

    def __init__(self, program: Program, wide: set[str], along_z: bool) -> None:
        self.program, self.wide, self.along_z = program, wide, along_z
        self.example: Value
        self.first: dict[str, Value] = {}       # of an example, its first element

    def begin(self, ops: list[Op]) -> None:
        """Emits which example a program is of, and where its elements begin."""
        place = _emit(ops, "program_id", (), axis=2 if self.along_z else 0)
        count = _constant(ops, self.program.grid[0])
        self.example = place if self.along_z else _emit(ops, "apply", (place, count), fn="quotient")
        self.inside = None if self.along_z else _emit(ops, "apply", (place, count), fn="remainder")
        for name in sorted({op.attributes["tensor"] for op in self.program.body.walk()
                            if op.name in ELEMENTS} & self.wide):
            size = _constant(ops, self.program.tensor(name).numel)
            self.first[name] = _emit(ops, "apply", (self.example, size), fn="mul")

    def copy(self, region: Region, made: Region) -> None:
        """The operations of a region."""
        for op in region.ops:
            inner = []
            for each in op.regions:
                inner.append(Region(each.arguments, [], each.yields))
                self.copy(each, inner[-1])
            self._copy(replace(op, regions=tuple(inner)), made.ops)

    def _copy(self, op: Op, ops: list[Op]) -> None:
        axis = op.attributes.get("axis")
        if op.name == "program_id" and (axis == 2 if self.along_z else axis == 0):
            zero = _constant(ops, 0)
            ops.append(Op("apply", (self.inside or zero, zero), op.results, {"fn": "add"}, line=op.line))
            return
        if op.name in BLOCKS and op.attributes["tensor"] in self.wide:
            op = replace(op, operands=(self.example, *op.operands),
                         attributes={**op.attributes, "sizes": (0, *op.attributes["sizes"])})
        if op.name in ELEMENTS and (first := self.first.get(op.attributes["tensor"])) is not None:
            op = replace(op,
                         operands=(self._add_example_offset(ops, op.operands[0], first), *op.operands[1:]))
        ops.append(op)

    def _add_example_offset(self, ops: list[Op], offsets: Value, first: Value) -> Value:
        """Offsets in the elements of all examples."""
        whole = _emit(ops, "broadcast", (first,), shape=offsets.shape) if offsets.shape else first
        return _emit(ops, "apply", (offsets, whole), shape=offsets.shape, fn="add")


def _constant(ops: list[Op], value: int) -> Value: return _emit(ops, "constant", (), value=value)


def _emit(ops: list[Op], name: str, operands: tuple[Value, ...], shape: tuple[int, ...] = (),
          **attributes: Any) -> Value:
    made = Value(TileType(dtypes.int32, shape))
    ops.append(Op(name, operands, (made,), attributes))
    return made
