"""The template of a convolution on a GPU: sm_80 and later."""
from __future__ import annotations

from tinygrad_nv.tile.conv import schedules
from tinygrad_nv.tile.conv.schedules import ConvMma
from tinygrad_nv.tile.conv.spec import ConvSpec
from tinygrad_nv.tile.legality import legality
from tinygrad_nv.tile.template import Family, Template, later

MMA = Template("conv_mma", ConvSpec, ConvMma, legality(schedules.problems), schedules.candidates,
               later("tinygrad_nv.tile.conv.mma", "conv_mma"))
FAMILY = Family("conv", (MMA,))
