"""The templates of sampling on a GPU: filters by weights, and programs."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.tile.limits import MOST_GRID
from tinygrad_nv.tile.order import BY_ROW
from tinygrad_nv.tile.programs import make_family
from tinygrad_nv.tile.sampling.program import PROGRAMS
from tinygrad_nv.tile.sampling.spec import FilterSpec
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import Family, make_template

FOLDER = "tinygrad_nv.tile.sampling"


@dataclass(frozen=True)
class Threshold(Schedule):
    """Nothing to choose."""
    template: ClassVar[str] = "threshold"


def problems(spec: FilterSpec, arch: str) -> list[str]:
    """Why no template takes a spec; empty when one does."""
    many = [f"{spec.rows} rows, at most {MOST_GRID}"] * (spec.rows > MOST_GRID)
    return many + ["counts, whose order does not matter"] * spec.counted


THRESHOLD = make_template(FilterSpec, Threshold, problems, f"{FOLDER}.threshold", "threshold")
FAMILY = Family("sampling", (THRESHOLD, *make_family("sampling", PROGRAMS, BY_ROW).templates),
                determinism_class=BY_ROW)
