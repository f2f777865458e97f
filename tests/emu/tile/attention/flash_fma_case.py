"""Random attentions in float32, held against the exact ones: for the tests of flash_fma."""
from __future__ import annotations

from attention_case import arguments, near, run
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.schedules import FlashFma
from tinygrad_nv.tile.attention.spec import AttentionSpec, Band
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F32 = dtypes.float32
CAUSAL = Band(None, 0)


def scheduled(m: int, n: int, warps_m: int, warps_n: int = 1, stages: int = 2) -> FlashFma:
    """Rows, columns, warps along both, stages."""
    return FlashFma().block(m, n).warps(warps_m, warps_n).stages(stages)


SMALL, SHARED = scheduled(32, 32, 2), scheduled(16, 32, 1, 4)


def close(spec: AttentionSpec, schedule: FlashFma = SMALL, arch: str = "sm_80", seed: int = 0,
          **extents: int) -> None:
    """Asserts that a random attention is near the exact one."""
    given = arguments(spec, seed)
    made = TABLE.build(spec, schedule, GPU(arch))
    near(spec, given, run(made, spec, given, arch, seed, **extents), **extents)
