"""The ranks of a run: what they add up, agree on and wait for, besides what a step computes.

Protocol: `TrainingRanks(world)` is made by all ranks, which call its methods in the same order. Figures of a
step (tokens with loss, losses) are added up in float64, in the order of ranks: all ranks get the same bits.
Rank 0 alone writes the log, the model and what all ranks have alike. Within `stoppable()` Ctrl-C does not
raise: it is asked for by the next `begin` of a step, so that all ranks stop after the same step.
"""
from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import numpy as np
from tinygrad import dtypes

from tinygrad_nv.dist.group import World
from tinygrad_nv.dist.launcher import RESTARTS

PATIENCE_S = 86400.0    # in which the slowest rank reads data, or writes a checkpoint


class TrainingRanks:
    """This process among the ranks of a run. `group` is for collectives of steps."""

    def __init__(self, world: World) -> None:
        self.world, self.group = world, world.group()
        self._figures, self._asked = world.group(), False

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.world.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self.world.size

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def started_again(self) -> bool:
        """Whether a launcher started the ranks again after one failed."""
        return os.environ.get(RESTARTS, "0") != "0"

    def summed(self, values: np.ndarray) -> np.ndarray:
        """The sums over ranks of float64 values."""
        if self.size == 1: return values
        given = np.ascontiguousarray(values, np.float64)
        out = np.empty_like(given)
        self._figures.run("all_reduce", out, given, given.size, dtypes.float64, name="figures of a step")
        return out

    def barrier(self, name: str) -> None:
        """Returns when all ranks have come to it; of any thread."""
        if self.world.store is not None: self.world.store.barrier(name, PATIENCE_S)

    def told(self, name: str, own: str) -> list[str]:
        """What every rank says, by rank."""
        return [each.decode() for each in self.world.exchange(f"{name}", own.encode())]

    @contextlib.contextmanager
    def first_before_others(self, name: str) -> Iterator[None]:
        """Rank 0 is within before the others are: they find files that it made."""
        if not self.first: self.barrier(name)
        yield
        if self.first: self.barrier(name)

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Ctrl-C within is a wish that `begin` tells all ranks: a step is whole or not taken. A second one
        stops this rank at once. In a thread that is not the main one Ctrl-C is not seen."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, frame: FrameType | None) -> None:
            if self._asked: raise KeyboardInterrupt
            self._asked = True
        before = signal.signal(signal.SIGINT, ask)
        try: yield
        finally: signal.signal(signal.SIGINT, before)

    def begin(self, counts: np.ndarray) -> np.ndarray:
        """The sums over ranks of what a step counts. Raises KeyboardInterrupt where a rank was asked to
        stop."""
        *sums, asked = self.summed(np.append(counts, float(self._asked)))
        if asked: raise KeyboardInterrupt
        return np.array(sums)
