"""The templates of sampling on a CPU: filters, and the programs of choices and counts of tokens."""
from __future__ import annotations

from tinygrad_nv.cpu.programs import make_family
from tinygrad_nv.cpu.sampling import threshold
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.order import BY_ROW
from tinygrad_nv.tile.sampling.program import PROGRAMS
from tinygrad_nv.tile.sampling.spec import FilterSpec
from tinygrad_nv.tile.template import Family

THRESHOLD = template(FilterSpec, threshold.CPUThreshold, threshold.default, threshold.problems,
                     threshold.__name__)
FAMILY = Family("sampling", (THRESHOLD, *make_family("sampling", PROGRAMS, BY_ROW).templates),
                determinism_class=BY_ROW)
