"""Random attentions through the mma.sync template, held against the exact ones: for its tests."""
from __future__ import annotations

import torch
from attention_case import arguments, near, run
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.schedules import FlashMma
from tinygrad_nv.tile.attention.spec import AttentionSpec, Band
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F16, BF16, F32 = dtypes.float16, dtypes.bfloat16, dtypes.float32
CAUSAL = Band(None, 0)
Given = dict[str, torch.Tensor]


def scheduled(m: int, n: int, warps: int, stages: int = 2) -> FlashMma:
    """Rows, columns, warps, stages."""
    return FlashMma().block(m, n).warps(warps).stages(stages)


SMALL = scheduled(32, 32, 2)


def close(spec: AttentionSpec, schedule: FlashMma = SMALL, arch: str = "sm_80", seed: int = 0,
          scale: float = 1.0, **extents: int) -> None:
    """Asserts that a random attention is near the exact one."""
    given = arguments(spec, seed, scale)
    made = TABLE.build(spec, schedule, GPU(arch))
    near(spec, given, run(made, spec, given, arch, seed, **extents), **extents)
