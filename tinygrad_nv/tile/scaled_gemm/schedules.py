"""The schedules of a matmul with scales of groups, and wgmma's tiles to try first.

128 × 128 with 64 rows for each of two consumers is DeepGEMM's tile for many rows: one consumer multiplies
while the other adds up. A tile of a stage is a group of K.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from tinygrad_nv.tile.gemm.schedules import Mma, Wgmma
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.scaled_gemm.spec import GROUP, ScaledGemmSpec
from tinygrad_nv.tile.template import GPU

STAGE_BYTES = 1024      # what stages of mma.sync's ring are multiples of
# rows, columns, warps, ping-pong, swapped
TILES = (
    (128, 128, 12, False, False), (256, 128, 12, False, False), (64, 128, 12, True, False),
    (128, 64, 12, False, False), (64, 128, 8, False, False), (64, 64, 8, False, False),
    (64, 8, 8, False, True), (64, 16, 8, False, True), (64, 32, 8, False, True), (64, 64, 8, False, True),
    (128, 16, 12, False, True), (128, 32, 12, False, True), (128, 64, 12, False, True),
    (64, 32, 8, False, False))


@dataclass(frozen=True)
class ScaledWgmma(Wgmma):
    """wgmma with scales: a stage of the ring is a group."""
    block_k: int = GROUP
    template: ClassVar[str] = "scaled_wgmma"


@dataclass(frozen=True)
class ScaledMma(Mma):
    """mma.sync with scales (mma/): a stage of the ring is a group."""
    block_k: int = GROUP
    template: ClassVar[str] = "scaled_mma"

    @classmethod
    def every(cls, arch: str, itemsize: int) -> Iterator[Self]:
        yield from (s for s in super().every(arch, itemsize) if s.block_k == GROUP)

    def deepest(self, arch: str, itemsize: int) -> Self:
        """With as many stages as fit in shared memory, each with as many scales as there can be."""
        scales = -(-4 * (self.block_m + self.block_n) // STAGE_BYTES) * STAGE_BYTES
        fit = SMEM_BYTES[arch] // (self.stage_bytes(itemsize) + scales)
        return self.stages(max(2, min(self.MOST_STAGES, fit)))


def candidates(spec: ScaledGemmSpec, gpu: GPU) -> tuple[ScaledWgmma, ...]:
    """The tiles, with the deepest ring that fits; none where there is no wgmma."""
    made = []
    for m, n, warps, pingpong, swap in TILES if gpu.arch == "sm_90a" else ():
        schedule = ScaledWgmma().block(m, n).warps(warps)
        if pingpong: schedule = schedule.pingpong()
        made.append((schedule.swap_operands() if swap else schedule).deepest(gpu.arch, spec.a.dtype.itemsize))
    return tuple(made)
