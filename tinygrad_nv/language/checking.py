"""Checks of what users give a kernel besides tensors: its grid, the gradients of its defvjp.

Protocol: `label(fn)` is how errors name a kernel, with the file and line of its function.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from tinygrad import Tensor

from tinygrad_nv.errors import LanguageError
from tinygrad_nv.shapes.types import dtype_text


def label(fn: FunctionType) -> str:
    """The name of a kernel, and where it is."""
    return f"{fn.__name__} ({fn.__code__.co_filename}:{fn.__code__.co_firstlineno})"


def grid_of(kernel: str, grid: Any, names: Mapping[str, Any]) -> tuple[int, ...]:
    """How many programs there are. `grid` is numbers, or a function of dimensions and constants by name.
    Raises `LanguageError`."""
    made = _compute_grid(kernel, grid, names) if callable(grid) else grid
    counts = tuple(made) if isinstance(made, (tuple, list)) else (made,)
    if not 1 <= len(counts) <= 3 or any(type(each) is not int for each in counts):
        raise LanguageError(f"the grid of kernel {kernel} is {made!r}", "one to three integers",
                            "round quotients up: cdiv(N, BM)")
    if min(counts) < 1:
        raise LanguageError(f"the grid of kernel {kernel} is {counts}: no programs",
                            "1 and more along each axis",
                            "do not call it with tensors of no elements")
    return counts


def _compute_grid(kernel: str, grid: Any, names: Mapping[str, Any]) -> Any:
    code = grid.__code__
    wanted = code.co_varnames[:code.co_argcount]
    if missing := [each for each in wanted if each not in names]:
        raise LanguageError(f"the grid of kernel {kernel} asks for {', '.join(missing)}",
                            f"names of dimensions or constants: {', '.join(names)}")
    try: return grid(**{each: names[each] for each in wanted})
    except Exception as error:
        place = f"{code.co_filename}:{code.co_firstlineno}"
        given = ", ".join(f"{each}={names[each]!r}" for each in wanted)
        raise LanguageError(f"{place}: the grid of kernel {kernel}: {type(error).__name__}: {error}",
                            f"a function that gives one to three integers for {given}") from error


def gradients_of(kernel: str, found: Any, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns what a defvjp gives: a Tensor or None for each input, of its shape. Raises `LanguageError`."""
    made = list(found) if isinstance(found, (tuple, list)) else [found]
    if len(made) > len(inputs):
        raise LanguageError(f"defvjp of kernel {kernel} gives {len(made)} gradients",
                            f"at most {len(inputs)}, one for each input")
    for i, (each, x) in enumerate(zip(made, inputs, strict=False)):
        if each is None or (isinstance(each, Tensor) and each.shape == x.shape): continue
        what = f"{dtype_text(each.dtype)} of shape {each.shape}" if isinstance(each, Tensor) else repr(each)
        raise LanguageError(f"defvjp of kernel {kernel} gives {what} for input {i}",
                            f"a Tensor of shape {x.shape}, or None")
    return made + [None] * (len(inputs) - len(made))
