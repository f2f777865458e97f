"""Random attentions through the mma.sync template, held against the exact ones: for its tests."""
from __future__ import annotations

import torch
from attention_case import arguments, near, run
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.mma.kernel import flash_mma
from tinygrad_nv.tile.attention.spec import AttentionSpec, Band
from tinygrad_nv.tile.schedule import Schedule

F16, BF16, F32 = dtypes.float16, dtypes.bfloat16, dtypes.float32
CAUSAL = Band(None, 0)
Given = dict[str, torch.Tensor]


def scheduled(m: int, n: int, warps: int, stages: int = 2) -> Schedule:
    """Rows, columns, warps, stages."""
    return Schedule(template="flash_mma").block(m, n).warps(warps).stages(stages)


SMALL = scheduled(32, 32, 2)


def close(spec: AttentionSpec, schedule: Schedule = SMALL, arch: str = "sm_80", seed: int = 0,
          scale: float = 1.0, **extents: int) -> None:
    """Asserts that a random attention is near the exact one."""
    given = arguments(spec, seed, scale)
    near(spec, given, run(flash_mma(spec, schedule, arch), spec, given, arch, seed, **extents), **extents)
