"""Random attentions in float32, held against the exact ones: for the tests of flash_fma."""
from __future__ import annotations

from attention_case import arguments, near, run
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.fma.kernel import flash_fma
from tinygrad_nv.tile.attention.spec import AttentionSpec, Band
from tinygrad_nv.tile.schedule import Schedule

F32 = dtypes.float32
CAUSAL = Band(None, 0)


def scheduled(m: int, n: int, warps_m: int, warps_n: int = 1, stages: int = 2) -> Schedule:
    """Rows, columns, warps along both, stages."""
    return Schedule(template="flash_fma").block(m, n).warps(warps_m, warps_n).stages(stages)


SMALL, SHARED = scheduled(32, 32, 2), scheduled(16, 32, 1, 4)


def close(spec: AttentionSpec, schedule: Schedule = SMALL, arch: str = "sm_80", seed: int = 0,
          **extents: int) -> None:
    """Asserts that a random attention is near the exact one."""
    given = arguments(spec, seed)
    near(spec, given, run(flash_fma(spec, schedule, arch), spec, given, arch, seed, **extents), **extents)
