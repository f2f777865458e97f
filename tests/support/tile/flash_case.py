"""The templates of attention for their tests: a small schedule of each; random attentions held against exact
ones."""
from __future__ import annotations

import torch
from tinygrad.dtype import dtypes

from tests.support.tile.attention_case import arguments, near, run
from tinygrad_nv.tile.attention.schedules import FlashFma, FlashMma, FlashWgmma
from tinygrad_nv.tile.attention.spec import AttentionSpec, Band
from tinygrad_nv.tile.kernel import AttentionKernel
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F16, BF16, F32 = dtypes.float16, dtypes.bfloat16, dtypes.float32
CAUSAL = Band(None, 0)
Given = dict[str, torch.Tensor]
FlashSchedule = FlashFma | FlashMma | FlashWgmma


def mma(m: int, n: int, warps: int, stages: int = 2) -> FlashMma:
    """Rows, columns, warps, stages."""
    return FlashMma().block(m, n).warps(warps).stages(stages)


def fma(m: int, n: int, warps_m: int, warps_n: int = 1, stages: int = 2) -> FlashFma:
    """Rows, columns, warps along both, stages."""
    return FlashFma().block(m, n).warps(warps_m, warps_n).stages(stages)


W = FlashWgmma()
MMA, WGMMA, FMA, SHARED = mma(32, 32, 2), W.block(128, 64), fma(32, 32, 2), fma(16, 32, 1, 4)


def arch_of(schedule: FlashSchedule) -> str:
    """Where a template is tested that no case names an architecture for."""
    return "sm_90a" if isinstance(schedule, FlashWgmma) else "sm_80"


def built(spec: AttentionSpec, schedule: FlashSchedule, arch: str = "") -> AttentionKernel:
    """The kernel."""
    made: AttentionKernel = TABLE.build(spec, schedule, GPU(arch or arch_of(schedule)))
    return made


def launch(spec: AttentionSpec, schedule: FlashSchedule, given: Given, arch: str = "", seed: int = 0,
           **extents: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result and l of a launch."""
    arch = arch or arch_of(schedule)
    return run(built(spec, schedule, arch), spec, given, arch, seed, **extents)


def close(spec: AttentionSpec, schedule: FlashSchedule, arch: str = "", seed: int = 0, scale: float = 1.0,
          **extents: int) -> None:
    """Asserts that a random attention is near the exact one."""
    given = arguments(spec, seed, scale)
    near(spec, given, launch(spec, schedule, given, arch, seed, **extents), **extents)
