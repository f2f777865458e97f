"""The templates of adapters on a CPU."""
from __future__ import annotations

from tinygrad_nv.cpu.lora import expand, shrink
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.lora.spec import LoraExpandSpec, LoraShrinkSpec
from tinygrad_nv.tile.template import Family

SHRINK = template(LoraShrinkSpec, shrink.CPULoraShrink, shrink.default, None, shrink.__name__)
EXPAND = template(LoraExpandSpec, expand.CPULoraExpand, expand.default, None, expand.__name__)
FAMILY = Family("lora", (SHRINK, EXPAND))
