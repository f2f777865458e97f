"""Random backward passes through the mma.sync template, held against the exact ones: for its tests."""
from __future__ import annotations

from backward_case import arguments, near, run
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.schedules import BackwardMma
from tinygrad_nv.tile.attention.spec import Band
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F16, BF16, F32 = dtypes.float16, dtypes.bfloat16, dtypes.float32
CAUSAL = Band(None, 0)


def scheduled(m: int, n: int, warps: int, stages: int = 2) -> BackwardMma:
    """Rows, keys, warps, stages."""
    return BackwardMma().block(m, n).warps(warps).stages(stages)


SMALL = scheduled(32, 32, 2)


def close(spec: BackwardSpec, schedule: BackwardMma = SMALL, arch: str = "sm_80", seed: int = 0,
          scale: float = 1.0, **extents: int) -> None:
    """Asserts that the gradients of a random attention are near the exact ones."""
    given = arguments(spec, seed, scale, **extents)
    made = TABLE.build(spec, schedule, GPU(arch))
    near(spec, given, run(made, spec, given, arch, seed, **extents), **extents)
