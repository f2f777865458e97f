"""Programs of users' kinds in the tile language, with their answers: `PROGRAMS`, each a `Case` (case.py) that
any device can be held to. Kernels are written as users write them; shapes are small."""
from __future__ import annotations

from tests.support.language.programs import attentions, elementwise, elsewhere, gathers, products, rows, scans
from tests.support.language.programs.case import Case

MODULES = (elementwise, rows, products, attentions, scans, gathers, elsewhere)
PROGRAMS: list[Case] = [each for module in MODULES for each in module.PROGRAMS]

# with sums by atomics, whose order is that in which programs happen to run
UNORDERED = ("layer_norm_backward", "split_k", "embedding_gradient")
