"""The templates of attention's backward pass for their tests: small schedules of each; random passes held
against exact ones."""
from __future__ import annotations

from functools import lru_cache

from tests.support.tile.backward_case import Given, Gradients, arguments, near, run
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.schedules import BackwardMma, BackwardWgmma
from tinygrad_nv.tile.kernel import BackwardKernel
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BackwardSchedule = BackwardMma | BackwardWgmma


def mma(m: int, n: int, warps: int, sharing: int = 1, stages: int = 2) -> BackwardMma:
    """Rows, keys, warps along the keys, warps that share keys, stages."""
    return BackwardMma().block(m, n).warps(warps, sharing).stages(stages)


W = BackwardWgmma()
MMA, SHARED = mma(32, 32, 2), mma(32, 32, 2, 2)
WIDE, LOW, SMALL = W.block(128, 128), W.block(64, 128), W.block(64, 64).warps(8)
HALVED = W.block(64, 64)  # two consumers share 64 keys
WGMMAS = (WIDE, LOW, SMALL, HALVED)


def arch_of(schedule: BackwardSchedule) -> str:
    """Where a template is tested that no case names an architecture for."""
    return "sm_90a" if isinstance(schedule, BackwardWgmma) else "sm_80"


@lru_cache(8)
def built(spec: BackwardSpec, schedule: BackwardSchedule, arch: str = "") -> BackwardKernel:
    """The kernel."""
    made: BackwardKernel = TABLE.build(spec, schedule, GPU(arch or arch_of(schedule)))
    return made


def gradients(spec: BackwardSpec, schedule: BackwardSchedule, given: Given, arch: str = "", seed: int = 0,
              **extents: int) -> Gradients:
    """Those of a launch."""
    arch = arch or arch_of(schedule)
    return run(built(spec, schedule, arch), spec, given, arch, seed, **extents)


def close(spec: BackwardSpec, schedule: BackwardSchedule, arch: str = "", seed: int = 0, scale: float = 1.0,
          **extents: int) -> None:
    """Asserts that the gradients of a random attention are near the exact ones."""
    given = arguments(spec, seed, scale, **extents)
    near(spec, given, gradients(spec, schedule, given, arch, seed, **extents), **extents)
