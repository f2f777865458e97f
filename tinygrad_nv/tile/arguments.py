"""Arguments of a call of a spec's kernels where no graph makes it: for tuning, predictions and tests.

Protocol: `calls(made, spec)` are the kernels of what a template built, each with the arguments it has;
`with_scratch` puts a kernel's scratch among its pointers; `launches(made, spec, alloc)` are its launches with
memory that `alloc` makes: so many bytes of zeros, with integers at the beginning that are places of something
else (a table of pages, lengths: `Argument.usual`), or what is `given` for an argument's name; scratch with
what it held.
`integers(spec)` are the integer arguments, at their most.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.kernel import Chain, Scratch, TileKernel
from tinygrad_nv.tile.reference import Argument, dense
from tinygrad_nv.tile.templates import TABLE

Memory = TypeVar("Memory")
Alloc = Callable[[int, np.ndarray | None], Memory]
Contents = Mapping[str, np.ndarray]
NOTHING: Contents = MappingProxyType({})
KINDS = {dtypes.int32: np.int32, dtypes.int64: np.int64}
ALIGNED = 16    # bytes that a buffer has at least


def calls(made: Any, spec: Any) -> list[tuple[Any, tuple[Argument, ...]]]:
    """Returns the kernels that are called, with their arguments in the order of their pointers. A chain's
    kernels share memory."""
    places: tuple[Argument, ...] = TABLE.arguments(spec)
    if not isinstance(made, Chain): return [(made, places)]
    between = Argument("between", made.between.dtype, (dense(made.between.count),), "out")
    return [(made.first, (between, *(each for each in places if each.role == "in"))),
            (made.second, (*(each for each in places if each.role != "in"), replace(between, role="in")))]


def with_scratch(made: Any, pointers: Sequence[Memory], places: Sequence[Argument],
                 alloc: Callable[[Scratch], Memory]) -> list[Memory]:
    """A kernel's pointers: scratch comes among the results or after them (kernel.py)."""
    outs = sum(each.role != "in" for each in places)
    order = list(pointers[:outs])
    for each in made.scratch:
        order.insert(len(order) if each.at is None else each.at, alloc(each))
    return order + list(pointers[outs:])


def launches(made: Any, spec: Any, alloc: Alloc[Memory],
             given: Contents = NOTHING) -> Iterator[tuple[TileKernel, list[Memory]]]:
    """Each kernel with its pointers, in the order of launches."""
    memory: dict[str, Memory] = {}
    arrays: dict[str, np.ndarray | None] = {}
    for one, places in calls(made, spec):
        for each in places:
            nbytes = max(ALIGNED, each.size * each.dtype.itemsize)
            contents = arrays[each.name] = given.get(each.name, _contents(each))
            if each.name not in memory: memory[each.name] = alloc(nbytes, contents)
        order = with_scratch(one, [memory[each.name] for each in places], places,
                             lambda some: alloc(max(ALIGNED, some.nbytes),
                                                some.held(arrays) if some.held else None))
        for kernel in one.kernels: yield kernel, order


def _contents(argument: Argument) -> np.ndarray | None:
    """The usual integers, one after the other; None where nothing depends on them."""
    if argument.usual is None: return None
    return np.resize(np.array(argument.usual, KINDS[argument.dtype]), argument.size)


def integers(spec: Any) -> tuple[int, ...]:
    """The integer arguments of a spec's kernels, each at its most; most specs have none."""
    return getattr(spec, "integers", ())
