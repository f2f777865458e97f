"""Random backward passes through the wgmma template, held against the exact ones: for its tests."""
from __future__ import annotations

from backward_case import arguments, near, run
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.schedules import BackwardWgmma
from tinygrad_nv.tile.attention.spec import Band
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F16, BF16, F32 = dtypes.float16, dtypes.bfloat16, dtypes.float32
CAUSAL = Band(None, 0)
W = BackwardWgmma()
WIDE, LOW, SMALL = W.block(128, 128), W.block(64, 128), W.block(64, 64).warps(8)
HALVED = W.block(64, 64)  # two consumers share 64 keys


def close(spec: BackwardSpec, schedule: BackwardWgmma = LOW, seed: int = 0, scale: float = 1.0,
          **extents: int) -> None:
    """Asserts that the gradients of a random attention are near the exact ones."""
    given = arguments(spec, seed, scale, **extents)
    got = run(TABLE.build(spec, schedule, GPU("sm_90a")), spec, given, "sm_90a", seed, **extents)
    near(spec, given, got, **extents)
