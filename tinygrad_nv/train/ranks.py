"""The ranks of a run: what they add up, agree on and wait for, besides what a step computes.

Protocol: `own_ranks(arguments)` gives what this process is by its environment: `OneRank`, for which nothing
of dist/ but the names of variables is imported, or `TrainingRanks`, whose methods all ranks call in the same
order. Figures of a step (tokens with loss, losses) are added up in float64, in the order of ranks: all ranks
get the same bits. Ranks of one data coordinate (layout.py) have the same figures, which count once. Rank 0
alone writes the log, the model and what all ranks have alike. Within `stoppable()` Ctrl-C does not raise: it
is asked for by the next `begin` of a step, so that all ranks stop after the same step.
"""
from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np
from tinygrad import dtypes

from tinygrad_nv.dist.ranks import RESTARTS, Ranks
from tinygrad_nv.engine.executor.plan import device_of
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.layout import ALIKE, Layout, Place, layout_of

if TYPE_CHECKING:    # a run of one rank does not load it
    from tinygrad_nv.dist.group import Group, World

PATIENCE_S = 86400.0    # in which the slowest rank reads data, or writes a checkpoint


class Stopped(KeyboardInterrupt):
    """Ctrl-C, between two steps."""


class OneRank:
    """A run of this process alone."""
    rank, size, layout = 0, 1, Layout()

    def __init__(self) -> None: self._asked = False

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def place(self) -> Place:
        """Coordinates of this rank."""
        return self.layout.place(self.rank)

    @property
    def is_restarted(self) -> bool:
        """Whether a launcher started the ranks again after one failed."""
        return os.environ.get(RESTARTS, "0") != "0"

    def device(self, name: str) -> str:
        """Returns this rank's device, of one kind for all."""
        return name

    def sum_over_ranks(self, values: np.ndarray) -> np.ndarray:
        """The sums over ranks of float64 values."""
        return values

    def sum_losses(self, values: np.ndarray) -> np.ndarray:
        """The sums of a loss, of which each rank has those of its tokens."""
        return self.sum_over_ranks(values if self.layout.adds(self.rank) else np.zeros_like(values))

    def barrier(self, name: str) -> None:
        """Returns when all ranks have come to it; of any thread."""

    def gather_texts(self, name: str, own: str) -> list[str]:
        """Returns the texts of every rank, by rank."""
        return [own]

    @contextlib.contextmanager
    def first_before_others(self, name: str) -> Iterator[None]:
        """Rank 0 is within before the others are: they find files that it made."""
        if not self.first: self.barrier(name)
        yield
        if self.first: self.barrier(name)

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Ctrl-C within is a wish that `begin` tells all ranks: a step is whole or not taken. A second one
        stops this rank at once, and nothing is saved. In a thread that is not the main one Ctrl-C is not
        seen."""
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
        """The sums over ranks of what a step counts. Raises `Stopped` where a rank was asked to stop."""
        own = counts if self.layout.counts(self.rank) else np.zeros_like(counts)
        *sums, asked = self.sum_over_ranks(np.append(own, float(self._asked)))
        if asked: raise Stopped
        return np.array(sums)


class TrainingRanks(OneRank):
    """Ranks of a run, as this process sees them. `mesh.group(axis, …)` is for collectives of steps."""

    def __init__(self, world: World, layout: Layout) -> None:
        super().__init__()
        from tinygrad_nv.dist.mesh import mesh
        self.world, self.layout, self._figures = world, layout, world.group()
        self.mesh = mesh(world, axes=layout.axes)
        self.rank, self.size = world.rank, world.size

    @property
    def group(self) -> Group:
        """The ranks that have the same parameters, each for tokens of its own."""
        return self.mesh.group(*ALIKE)

    def device(self, name: str) -> str:
        """Returns this rank's device: of GPUs the one with its number on its host."""
        return device_of(self.world, name, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def sum_over_ranks(self, values: np.ndarray) -> np.ndarray:
        """The sums over ranks of float64 values."""
        given = np.ascontiguousarray(values, np.float64)
        out = np.empty_like(given)
        self._figures.run("all_reduce", out, given, given.size, dtypes.float64, name="figures of a step")
        return out

    def barrier(self, name: str) -> None:
        """Returns when all ranks have come to it; of any thread."""
        if self.world.store is not None: self.world.store.barrier(name, PATIENCE_S)

    def gather_texts(self, name: str, own: str) -> list[str]:
        """Returns the texts of every rank, by rank."""
        return [each.decode() for each in self.world.exchange(name, own.encode())]


def own_ranks(arguments: TrainingArguments) -> OneRank:
    """Returns the ranks of this process. Raises `DistError`, and `ConfigError` for another number of ranks
    than the arguments say."""
    layout = layout_of(arguments, Ranks.from_environment().world_size)
    if layout.size == 1: return OneRank()
    from tinygrad_nv.dist import group
    return TrainingRanks(group.world(), layout)
