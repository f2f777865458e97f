"""Numbers that a kernel's function reads from around it: globals, and variables of the functions around it.

Protocol: `capture_values(fn)` is hashable, and another one when one of these has another value, so that a
kernel is read again; functions of the user's that the function names count with theirs. Of attributes and of
other objects than numbers (Python's and NumPy's), texts, dtypes, and tuples, lists and dicts of them, it sees
which object it is, and keeps it: another object may have the address of one that is gone. """
from __future__ import annotations

import dis
import functools
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

import numpy as np
from tinygrad.dtype import DType

from tinygrad_nv.tile.language.source import is_library

PLAIN = (int, bool, str, type(None), DType)


def capture_values(fn: FunctionType) -> tuple[Any, ...]:
    """Returns the values by which a function's program depends on what is around it."""
    found: dict[FunctionType, tuple[Any, ...]] = {}
    _visit(fn, found)
    return tuple(found.values())


class Same:
    """An object, equal to itself alone."""

    def __init__(self, value: Any) -> None: self.value = value
    def __hash__(self) -> int: return id(self.value)
    def __eq__(self, other: object) -> bool: return isinstance(other, Same) and other.value is self.value


def exact(value: Any) -> Any:
    """A key for a value: those of numbers of other types, or signs, differ."""
    if isinstance(value, np.generic): return type(value), value.tobytes()
    if isinstance(value, float): return float, value.hex()
    if isinstance(value, PLAIN): return type(value), value
    if isinstance(value, (tuple, list)): return type(value), tuple(map(exact, value))
    if isinstance(value, Mapping): return tuple((exact(key), exact(each)) for key, each in value.items())
    return Same(value)


def _visit(fn: FunctionType, found: dict[FunctionType, tuple[Any, ...]]) -> None:
    found[fn] = ()
    values = list[Any]()
    for name in _names(fn.__code__):
        if name in fn.__globals__: values.append(fn.__globals__[name])
    for cell in fn.__closure__ or ():
        try: values.append(cell.cell_contents)
        except ValueError: continue       # a variable without a value yet
    inner = [getattr(each, "__tile_function__", each) for each in values]
    found[fn] = fn.__code__, fn.__defaults__ and exact(fn.__defaults__), *map(exact, inner)
    for each in inner:
        if isinstance(each, FunctionType) and each not in found and not is_library(each.__module__ or ""):
            _visit(each, found)


@functools.lru_cache(1024)
def _names(code: CodeType) -> tuple[str, ...]:
    """The names that a function, and those inside of it, read of the module."""
    inside = [name for each in code.co_consts if isinstance(each, CodeType) for name in _names(each)]
    own = [each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return tuple(dict.fromkeys((*own, *inside)))
