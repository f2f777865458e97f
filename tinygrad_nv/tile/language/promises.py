"""Promises on tiles of a program: ranges that are looked at while a kernel is debugged.

Protocol: `promise(out, function, least, most, stable)` writes for each tile of floats in a function's result
an operation `promise` [name, at, least, most, stable], which the interpreter checks (interpret.py). Targets
never see one: `without(program)` is the program that is built.
"""
from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv.tile.language.ir import Line, Program, Region
from tinygrad_nv.tile.language.trace import current
from tinygrad_nv.tile.language.values import Tile

NAME = "promise"


def promise(out: Any, function: Any, least: float, most: float, stable: bool) -> None:
    """Says what the tiles of a function's result are. They are named by their place in it."""
    code = inspect.unwrap(function).__code__
    at = Line(code.co_filename, code.co_firstlineno)
    for place, tile in _tiles(out):
        said = {"name": function.__name__ + place, "at": at, "least": least, "most": most, "stable": stable}
        current().emit(NAME, [tile.value], (), said)


def _tiles(out: Any, place: str = "") -> Iterator[tuple[str, Tile]]:
    if isinstance(out, Tile):
        if dtypes.is_float(out.dtype): yield place, out
    elif isinstance(out, dict):
        for name, each in out.items(): yield from _tiles(each, f"{place}[{name!r}]")
    elif isinstance(out, list | tuple):
        for i, each in enumerate(out): yield from _tiles(each, f"{place}[{i}]")


def without(program: Program) -> Program:
    """A program that promises nothing; itself where it does not."""
    if not any(op.name == NAME for op in program.body.walk()): return program
    return replace(program, body=_without(program.body))


def _without(region: Region) -> Region:
    ops = [replace(op, regions=tuple(map(_without, op.regions))) for op in region.ops if op.name != NAME]
    return Region(region.arguments, ops, region.yields)
