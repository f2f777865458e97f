"""Indices that are out of range, which kernels do not see.

Protocol. Inside `recording()`, an operator gives each index to `check_index`, which notes whether any is out
of range. `first_failed` of what was noted is one number: 0, or one more than the place of the first in
`names`. The graph computes it with its results, and `refusal` says what to raise.
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import NVError, TorchError, as_well

_own = threading.local()


class Checks:
    """Checks of indices that a graph has to make."""

    def __init__(self) -> None: self.bad: dict[tuple[object, ...], tuple[str, Tensor]] = {}

    @property
    def names(self) -> list[str]:
        """The operators and their ranges, in words."""
        return [name for name, _ in self.bad.values()]

    def first_failed(self) -> Tensor | None:
        """0, or the number of the first check that fails, from 1 on; None of no checks."""
        made: Tensor | None = None
        for number, (_, bad) in reversed(list(enumerate(self.bad.values(), 1))):
            made = bad.where(number, 0 if made is None else made)
        return None if made is None else made.cast(dtypes.int32)


@contextlib.contextmanager
def recording() -> Iterator[Checks]:
    """Notes what is checked inside."""
    before, _own.checks = getattr(_own, "checks", None), Checks()
    try: yield _own.checks
    finally: _own.checks = before


def check_index(operator: str, index: Tensor, extent: int, negative: bool = False) -> Tensor:
    """The index; `negative`: it may count from the end."""
    checks = getattr(_own, "checks", None)
    if checks is None or not index.numel() or not isinstance(extent, int): return index
    least = -extent if negative else 0
    key = index.uop, least, extent
    if key not in checks.bad:
        signed = index.cast(dtypes.int64) if dtypes.is_unsigned(index.dtype) else index
        words = f"{operator}: an index is out of range, {least} to {extent - 1} of {extent} elements"
        checks.bad[key] = words, ((signed < least) | (signed >= extent)).any()
    return index


def refusal(words: str) -> NVError:
    """Returns the error of a check that failed: an IndexError, as torch has it."""
    return as_well(TorchError(words, "indices of elements that there are",
                              "NV_TORCH_CHECK=0 computes without checks, with unspecified results"),
                   IndexError())
