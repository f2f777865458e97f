"""The templates of a convolution on a GPU: sm_90a with wgmma, sm_80 and later."""
from __future__ import annotations

from tinygrad_nv.tile.conv import schedules
from tinygrad_nv.tile.conv.schedules import ConvMma, ConvWgmma
from tinygrad_nv.tile.conv.spec import ConvSpec
from tinygrad_nv.tile.legality import legality
from tinygrad_nv.tile.template import Family, Template, lazy_build

WGMMA = Template("conv_wgmma", ConvSpec, ConvWgmma, legality(schedules.wgmma_problems),
                 schedules.wgmma_candidates, lazy_build("tinygrad_nv.tile.conv.wgmma", "conv_wgmma"))
MMA = Template("conv_mma", ConvSpec, ConvMma, legality(schedules.mma_problems), schedules.mma_candidates,
               lazy_build("tinygrad_nv.tile.conv.mma", "conv_mma"))
FAMILY = Family("conv", (WGMMA, MMA))
