"""The template of rows on a GPU: norms, softmax, argmax."""
from __future__ import annotations

from tinygrad_nv.tile.norm.plan import NormPlan, problems
from tinygrad_nv.tile.norm.spec import NormSpec
from tinygrad_nv.tile.template import Family, fixed

NORM = fixed(NormSpec, NormPlan, problems, "tinygrad_nv.tile.norm.kernel", "norm", NormPlan.of)
FAMILY = Family("norm", (NORM,))
