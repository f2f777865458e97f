"""The bytes of device memory that a piece of work touches, and how.

Protocol: `Runs` are those of one allocation: flags of READ, WRITE, ATOMIC_READ and ATOMIC_WRITE for each
byte, kept where they change. Two accesses conflict when one of them writes and they are not both atomic. A
`Footprint` has the runs of each allocation that some work touched, and what to call the work.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

READ, WRITE, ATOMIC_READ, ATOMIC_WRITE = 1, 2, 4, 8     # footprint.c: TOUCH_
ANY_READ, ANY_WRITE, ATOMIC = READ | ATOMIC_READ, WRITE | ATOMIC_WRITE, ATOMIC_READ | ATOMIC_WRITE


def _conflict(a: int, b: int) -> bool:
    return bool((a | b) & ANY_WRITE) and bool(a and b) and bool((a | b) & ~ATOMIC)


CONFLICT = np.array([[_conflict(a, b) for b in range(16)] for a in range(16)])


class Overlap(NamedTuple):
    """Bytes `start` to `stop` of an allocation, and what two works do with the first of them."""
    start: int
    stop: int
    flags: int
    other: int


@dataclass(frozen=True, eq=False)
class Runs:
    """Bytes of one allocation: those from `bounds[i]` to `bounds[i + 1]` have `flags[i]`, 0 where they are
    not touched."""
    bounds: np.ndarray      # int64, ascending, one more than `flags`
    flags: np.ndarray       # uint8

    @classmethod
    def of(cls, start: int, stop: int, flags: int) -> Runs:
        return cls(np.array([start, stop]), np.array([flags], np.uint8))

    @cached_property
    def all(self) -> int:
        """The flags of all bytes together."""
        return int(np.bitwise_or.reduce(self.flags))

    @cached_property
    def key(self) -> bytes:
        """The same for the same bytes and flags."""
        return self.bounds.tobytes() + self.flags.tobytes()

    def paint(self, into: np.ndarray) -> None:
        """Sets the flags in an array with a byte for each byte of the allocation."""
        for start, stop, flags in zip(self.bounds[:-1], self.bounds[1:], self.flags, strict=True):
            into[start:stop] |= flags

    def at(self, places: np.ndarray) -> np.ndarray:
        """The flags of bytes at these places."""
        padded = np.concatenate(([0], self.flags, [0])).astype(np.uint8)
        return padded[np.searchsorted(self.bounds, places, "right")]

    def merge(self, other: Runs) -> Runs:
        """Returns the bytes that either touches."""
        bounds = np.union1d(self.bounds, other.bounds)
        return Runs(bounds, self.at(bounds[:-1]) | other.at(bounds[:-1]))

    def conflict(self, other: Runs) -> Overlap | None:
        """The first bytes for which the two conflict."""
        low, high = max(self.bounds[0], other.bounds[0]), min(self.bounds[-1], other.bounds[-1])
        if low >= high or not CONFLICT[self.all, other.all]: return None
        cuts = np.union1d(self.bounds, other.bounds)
        mine, others = self.at(cuts), other.at(cuts)
        bad = CONFLICT[mine, others]
        if not bad.any(): return None
        first = int(bad.argmax())
        last = first + int((~bad[first:]).argmax())
        return Overlap(int(cuts[first]), int(cuts[last]), int(mine[first]), int(others[first]))


@dataclass(frozen=True)
class Footprint:
    """Bytes that some work touched. Keys are the allocations: a `Buffer`, or page-locked memory of the
    host."""
    what: str
    runs: dict[object, Runs] = field(default_factory=dict)

    def signature(self) -> dict[int, bytes]:
        """The same for the same bytes, touched in the same way. It keeps no memory alive."""
        return {id(memory): runs.key for memory, runs in self.runs.items()}
