"""The template of adapters on GPUs. Shrink is a grouped matmul there (patterns/lora/named.py)."""
from __future__ import annotations

from tinygrad_nv.tile.legality import legality
from tinygrad_nv.tile.lora import plan
from tinygrad_nv.tile.lora.spec import LoraExpandSpec
from tinygrad_nv.tile.template import Family, Template, lazy_build

EXPAND = Template("lora_expand_mma", LoraExpandSpec, plan.LoraExpandMma, legality(plan.problems),
                  plan.candidates, lazy_build("tinygrad_nv.tile.lora.kernel", "lora_expand_mma"), plan.cost)
FAMILY = Family("lora", (EXPAND,))
