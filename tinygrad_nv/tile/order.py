"""Schedule classes: schedules by which a row has the same bits, whatever rows there are beside it.

Protocol: with NV_DETERMINISTIC=1, or inside `with deterministic():` (numerics/policy.py), `Table.choose` asks
a family for the class of a spec instead of its fastest schedule. A class fixes which numbers of a row are
added in which order, and in what arithmetic: the instruction, blocks of a sum, no split of a sum that depends
on how many rows there are. It leaves free what changes no bit: tiles of rows, stages, clusters, parts.
Nothing that was tuned is taken. `Ordered.words` are what `explain()` shows.

A family that says nothing has no class: a template of it is refused, in words, and the reference
implementation runs, whose kernels are tinygrad's, each with the loops as they are written (`WRITTEN`).
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv import config
from tinygrad_nv.tile.schedule import Schedule

SETTING = "NV_DETERMINISTIC"
CLASS = "class: "                    # before the words of a class, for a reader
WRITTEN = CLASS + "loops as written, sums in index order"
BY_ROW = "a row at a time, in an order that its length gives"
BY_ELEMENT = "no sums over a row"
PROGRAM = "the schedule of the kernel alone, sums in the order of its program"
OVER_ROWS = "sums over rows, in an order that extents give; rows beside are part of them"


@dataclass(frozen=True)
class Ordered:
    """A schedule and the class that it is of, in words."""
    schedule: Schedule
    words: str


def is_wanted() -> bool:
    """Whether schedules have to be of one class."""
    return bool(config.get(SETTING))
