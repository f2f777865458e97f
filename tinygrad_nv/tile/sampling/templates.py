"""The templates of sampling on a GPU: filters, choices and counts of tokens."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.tile.limits import MOST_GRID
from tinygrad_nv.tile.order import BY_ROW
from tinygrad_nv.tile.sampling.spec import ChoiceSpec, CountSpec, FilterSpec
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import Family, make_template

FOLDER = "tinygrad_nv.tile.sampling"


@dataclass(frozen=True)
class Threshold(Schedule):
    """Nothing to choose."""
    template: ClassVar[str] = "threshold"


@dataclass(frozen=True)
class Choice(Schedule):
    """Nothing to choose."""
    template: ClassVar[str] = "choice"


@dataclass(frozen=True)
class Count(Schedule):
    """Nothing to choose."""
    template: ClassVar[str] = "count"


def problems(spec: FilterSpec | ChoiceSpec | CountSpec, arch: str) -> list[str]:
    """Why no template takes a spec; empty when one does."""
    return [f"{spec.rows} rows, at most {MOST_GRID}"] if spec.rows > MOST_GRID else []


THRESHOLD = make_template(FilterSpec, Threshold, problems, f"{FOLDER}.threshold", "threshold")
CHOICE = make_template(ChoiceSpec, Choice, problems, f"{FOLDER}.choice", "choice")
COUNT = make_template(CountSpec, Count, problems, f"{FOLDER}.choice", "count")
FAMILY = Family("sampling", (THRESHOLD, CHOICE, COUNT), determinism_class=BY_ROW)
