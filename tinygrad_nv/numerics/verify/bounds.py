"""`@numerics(stable=True, bounded=[-100, 100])`: what a function returns stays within a range.

Protocol: with NV_DEBUG=1 each Tensor that the function returns, alone or in tuples, lists and dicts, is

    proved      where `interval` (interval.py) of its graph lies within the range: nothing runs
    computed    otherwise: realized, its range read, and `NumericsError` raised where it is not within

`stable`: no element is NaN or infinite, which `bounded` includes. Without NV_DEBUG nothing is checked and
nothing costs anything. While a TinyJit captures, values are not there: what cannot be proved is then left to
the calls before. Tiles that a function returns in a kernel of the tile language are computed in NumPy, from
the arguments of each call (tile/language/promises.py). The function has `numerics`, a `Bounds`, for those
that compile it rather than call it.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from tinygrad import Tensor, dtypes
from tinygrad.engine import jit

from tinygrad_nv import config
from tinygrad_nv.errors import NumericsError
from tinygrad_nv.numerics.verify.interval import interval
from tinygrad_nv.tile.language.promises import promise
from tinygrad_nv.tile.language.trace import tracing

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Bounds:
    """Bounds that a function promises of its results."""
    stable: bool = True
    least: float = -math.inf
    most: float = math.inf

    def __str__(self) -> str:
        if math.isinf(self.least) and math.isinf(self.most): return "finite numbers"
        return f"numbers of {self.least:g} … {self.most:g}"


def numerics(stable: bool = True, bounded: Sequence[float] | None = None
             ) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """A decorator; see above. Raises `NumericsError` for a range that is none, and, with NV_DEBUG=1, from
    calls whose results leave it."""
    promised = Bounds(stable, *_range(bounded))

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            out = function(*args, **kwargs)
            if config.get("NV_DEBUG"):
                if tracing(): promise(out, function, promised.least, promised.most, promised.stable)
                else:
                    for place, tensor in tensors(out): check(promised, function.__name__ + place, tensor)
            return out
        call.numerics = promised  # type: ignore[attr-defined]
        return call
    return decorate


def _range(bounded: Sequence[float] | None) -> tuple[float, float]:
    if bounded is None: return -math.inf, math.inf
    if len(bounded) != 2 or not float(bounded[0]) <= float(bounded[1]):
        raise NumericsError(f"bounded={list(bounded)}", "the least and the largest number, [-100, 100]")
    return float(bounded[0]), float(bounded[1])


def tensors(out: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of floats of a result, and where they are in it."""
    if isinstance(out, Tensor):
        if dtypes.is_float(out.dtype): yield place, out
    elif isinstance(out, dict):
        for name, each in out.items(): yield from tensors(each, f"{place}[{name!r}]")
    elif isinstance(out, list | tuple):
        for i, each in enumerate(out): yield from tensors(each, f"{place}[{i}]")


def check(promised: Bounds, name: str, tensor: Tensor) -> bool:
    """Whether it was proved. Raises `NumericsError` where a result leaves its range."""
    known = interval(tensor)
    if known.within(promised.least, promised.most) and (known.finite or not promised.stable): return True
    if jit.capturing: return False
    wide = tensor.detach().float()
    least, most, broken = (float(each.item()) for each in (
        wide.min(), wide.max(), wide.isfinite().logical_not().sum()))
    if promised.stable and broken:
        raise NumericsError(f"{name} has {broken:.0f} of {tensor.numel()} elements that are NaN or infinite",
                            str(promised), "with verify.sentinels(): names the kernel that made the first")
    if least < promised.least or most > promised.most:
        raise NumericsError(f"{name} has elements of {least:g} … {most:g}; by its graph alone they lie in "
                            f"{known}", str(promised), "scale its operands, or state a wider range")
    return False
