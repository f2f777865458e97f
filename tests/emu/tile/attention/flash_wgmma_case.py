"""Random attentions through the wgmma template, held against the exact ones: for its tests."""
from __future__ import annotations

import torch
from attention_case import arguments, near, run
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.schedules import FlashWgmma
from tinygrad_nv.tile.attention.spec import AttentionSpec, Band
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F16, BF16, F32 = dtypes.float16, dtypes.bfloat16, dtypes.float32
CAUSAL = Band(None, 0)
W = FlashWgmma()
SMALL = W.block(128, 64)
Given = dict[str, torch.Tensor]


def close(spec: AttentionSpec, schedule: FlashWgmma = SMALL, seed: int = 0, scale: float = 1.0,
          **extents: int) -> None:
    """Asserts that a random attention is near the exact one."""
    given = arguments(spec, seed, scale)
    made = TABLE.build(spec, schedule, GPU("sm_90a"))
    near(spec, given, run(made, spec, given, "sm_90a", seed, **extents), **extents)
