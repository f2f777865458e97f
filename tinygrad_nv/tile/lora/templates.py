"""The template of adapters on GPUs. Shrink is a grouped matmul there (patterns/lora/named.py)."""
from __future__ import annotations

from tinygrad_nv.tile.grouped_gemm.cost import cheapest
from tinygrad_nv.tile.legality import legality
from tinygrad_nv.tile.lora import plan
from tinygrad_nv.tile.lora.spec import LoraExpandSpec
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU, Family, Template, later

EXPAND = Template("lora_expand_mma", LoraExpandSpec, plan.LoraExpandMma, legality(plan.problems),
                  plan.candidates, later("tinygrad_nv.tile.lora.kernel", "lora_expand_mma"), plan.cost)


def _default(spec: LoraExpandSpec, gpu: GPU) -> Schedule | None: return cheapest((EXPAND,), spec, gpu)


FAMILY = Family("lora", (EXPAND,), defaults=_default)
