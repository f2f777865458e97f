"""One of several tensors, or numbers, that only the running kernel knows.

Protocol: `select(i, tensors, numbers, …)` is what stands at i in each of lists that are equally long: of
tensors, with one axis each and one dtype, a tensor that is read and written as any other, whose `length` is a
scalar; of integers a scalar. Tensors at one place have one length. A tensor that the kernel writes is in one
list of one `select`, and is not accessed besides.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv.tile.language.ir import Program, TensorParameter, TileType
from tinygrad_nv.tile.language.memory import ChosenRef, TensorRef
from tinygrad_nv.tile.language.trace import current, fail
from tinygrad_nv.tile.language.values import Operand, Tile, cast, describe, scalar

S32 = TileType(dtypes.int32)


def select(index: Operand, *lists: Sequence[Any]) -> Any:
    """Takes one of each list, the first below 0 and the last beyond the end; a tuple, of several lists."""
    given, place = [list(each) for each in lists], scalar(index, dtypes.int32)
    if not given or not given[0] or len({len(each) for each in given}) > 1:
        fail(f"tile.select among {[len(each) for each in given]}", "lists of one length, 1 and more")
    if place.shape or not dtypes.is_int(place.dtype):
        fail(f"tile.select by {describe(place)}", "a scalar of integers")
    if (known := current().constant_of(place.value)) is not None:
        found = [each[min(max(known, 0), len(each) - 1)] for each in given]
        return found[0] if len(found) == 1 else tuple(found)
    tensors = [each for each in given if isinstance(each[0], TensorRef)]
    numbers = [each for each in given if not isinstance(each[0], TensorRef)]
    lengths = _check_tensors(tensors) or (0,) * len(given[0])
    for each in numbers:
        if any(type(one) is not int for one in each):
            fail("tile.select among what differs", "tensors, or integers")
        if not all(-1 << 31 <= one < 1 << 31 for one in each):
            fail(f"tile.select among {max(each, key=abs)}", "integers of 32 bits")
    names = [current().name_choice(_parameter(each, lengths)) for each in tensors]
    made = list(map(Tile, current().emit("select", [cast(place, dtypes.int32).value],
                                         [S32] * (len(names) + 1 + len(numbers)),
                                         {"choices": tuple(each.name for each in names), "lengths": lengths,
                                          "numbers": tuple(map(tuple, numbers))})))
    length, others = made[len(names)], iter(made[len(names) + 1:])
    refs = iter([ChosenRef(each, handle, length) for each, handle in zip(names, made, strict=False)])
    found = [next(refs) if isinstance(each[0], TensorRef) else next(others) for each in given]
    return found[0] if len(found) == 1 else tuple(found)


def _check_tensors(lists: Sequence[Sequence[Any]]) -> tuple[int, ...]:
    """How long the tensors at each place are."""
    for each in lists:
        if not all(isinstance(one, TensorRef) and one.ndim == 1 and not one.first for one in each):
            fail("tile.select among what differs", "tensors of one axis, or integers")
        kinds = {replace(one.parameter, name="", shape=(), steps=None, offset=0, of="") for one in each}
        if len(kinds) > 1: fail(f"tile.select among {', '.join(map(str, each[:3]))}, …",
                                "one dtype, all inputs or all outputs")
    lengths = {tuple(one.shape[0] for one in each) for each in lists}
    if len(lengths) > 1: fail("tile.select of tensors of different lengths", "one length at each place")
    return next(iter(lengths), ())


def _parameter(tensors: Sequence[TensorRef], lengths: tuple[int, ...]) -> TensorParameter:
    return replace(tensors[0].parameter, name="", shape=(len(tensors), max(lengths)), steps=(0, 1), offset=0,
                   of="", among=tuple(each.name for each in tensors))


def with_choices(program: Program, choices: Sequence[TensorParameter]) -> Program:
    """The program with those that it has in the end. Raises `LanguageError` for a tensor that is written and
    accessed by several names."""
    ops = list(program.body.walk())
    used = {name for op in ops if op.name == "select" for name in op.attributes["choices"]}
    if not used: return program
    made = replace(program, choices=tuple(each for each in choices if each.name in used))
    names = {op.attributes["tensor"] for op in ops if "tensor" in op.attributes} - used
    count = Counter([*names, *(name for each in made.choices for name in each.among)])
    for each in program.tensors:
        if each.output and count[each.name] > 1:
            fail(f"{each.name}, which is written, in several lists of tile.select, or beside one",
                 "one list that has it, and no access besides")
    return made
