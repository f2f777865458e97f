"""The template of rows on a GPU: norms, softmax, argmax."""
from __future__ import annotations

from tinygrad_nv.tile.norm.legality import problems
from tinygrad_nv.tile.norm.schedules import Norm
from tinygrad_nv.tile.norm.spec import NormSpec
from tinygrad_nv.tile.order import BY_ROW
from tinygrad_nv.tile.template import Family, Template, lazy_build

NORM = Template("norm", NormSpec, Norm, problems, lambda spec, gpu: (Norm.of(spec, gpu.arch),),
                lazy_build("tinygrad_nv.tile.norm.kernel", "norm"))
FAMILY = Family("norm", (NORM,), determinism_class=BY_ROW)
