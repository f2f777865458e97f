"""The templates of an all-reduce on GPUs."""
from __future__ import annotations

from tinygrad_nv.tile.all_reduce.cost import candidates, cost, default
from tinygrad_nv.tile.all_reduce.legality import problems
from tinygrad_nv.tile.all_reduce.schedules import Multimem, OneShot, TwoShot
from tinygrad_nv.tile.all_reduce.spec import AllReduceSpec
from tinygrad_nv.tile.template import Family, Template, lazy_build

KERNEL = "tinygrad_nv.tile.all_reduce.kernel"
ONE_SHOT = Template(OneShot.template, AllReduceSpec, OneShot, problems,
                    lambda spec, gpu: candidates(spec, OneShot), lazy_build(KERNEL, "one_shot"), cost)
TWO_SHOT = Template(TwoShot.template, AllReduceSpec, TwoShot, problems,
                    lambda spec, gpu: candidates(spec, TwoShot), lazy_build(KERNEL, "two_shot"), cost)
MULTIMEM = Template(Multimem.template, AllReduceSpec, Multimem, problems,
                    lambda spec, gpu: candidates(spec, Multimem), lazy_build(KERNEL, "multimem"), cost)
FAMILY = Family("all_reduce", (ONE_SHOT, TWO_SHOT, MULTIMEM), defaults=default)
