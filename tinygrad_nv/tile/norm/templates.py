"""The template of rows on a GPU: norms, softmax, argmax."""
from __future__ import annotations

from tinygrad_nv.tile.norm.plan import Plan, problems
from tinygrad_nv.tile.norm.spec import NormSpec
from tinygrad_nv.tile.template import Family, fixed

NORM = fixed(NormSpec, Plan, problems, "tinygrad_nv.tile.norm.kernel", "norm", Plan.of)
FAMILY = Family("norm", (NORM,))
