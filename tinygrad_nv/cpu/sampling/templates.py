"""The templates of sampling on a CPU: filters, choices and counts of tokens."""
from __future__ import annotations

from tinygrad_nv.cpu.sampling import choice, threshold
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.order import BY_ROW
from tinygrad_nv.tile.sampling.spec import ChoiceSpec, CountSpec, FilterSpec
from tinygrad_nv.tile.template import Family

THRESHOLD = template(FilterSpec, threshold.CPUThreshold, threshold.default, None, threshold.__name__)
CHOICE = template(ChoiceSpec, choice.CPUChoice, choice.default, None, choice.__name__, "whole")
COUNT = template(CountSpec, choice.CPUCount, choice.default_count, None, choice.__name__, "build_count")
FAMILY = Family("sampling", (THRESHOLD, CHOICE, COUNT), determinism_class=BY_ROW)
