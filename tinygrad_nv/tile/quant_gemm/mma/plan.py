"""Plan of `quant_mma`, which follows from a spec and a schedule.

Protocol: that of gemm/mma/plan.py; a stage has a tile of activations, and for each part the boxes of its
columns (stages.py).

`problems` is what the template asks of a schedule; `candidates` are tiles worth trying first: wide ones for
few rows of activations, since every row of CTAs makes operands of all codes.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from tinygrad_nv.quant.types import QType
from tinygrad_nv.tile import limits
from tinygrad_nv.tile.gemm.mma import template as mma
from tinygrad_nv.tile.gemm.mma.plan import MmaPlan
from tinygrad_nv.tile.quant_gemm import stages
from tinygrad_nv.tile.quant_gemm.schedules import QuantMma
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.quant_gemm.stages import Box, boxes
from tinygrad_nv.tile.template import GPU

MOST_SUMS = 128     # of a thread, beside operands in the making


@dataclass(frozen=True)
class QuantMmaPlan(MmaPlan):
    """See above."""
    schedule: QuantMma
    quant: QuantGemmSpec

    @staticmethod
    @lru_cache(1024)
    def of(quant: QuantGemmSpec, s: QuantMma) -> QuantMmaPlan:
        """The plan."""
        return QuantMmaPlan(quant.gemm, s, quant)

    @property
    def type(self) -> QType: return self.quant.type

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """Codes and factors of the columns of one part."""
        return boxes(self.quant, self.columns, self.schedule.block_k)

    @property
    def activation_bytes(self) -> int:
        """Bytes of a stage's activations."""
        return self.schedule.block_m * self.schedule.block_k * self.spec.a.dtype.itemsize

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        nbytes = self.activation_bytes + self.spec.parts * self.boxes[-1].end
        return -(-nbytes // 1024) * 1024

    @property
    def ring_bytes(self) -> int: return self.schedule.depth * self.stage_bytes


def problems(spec: QuantGemmSpec, s: QuantMma, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    gemm_spec, columns = spec.gemm, QuantMmaPlan.of(spec, s).columns
    apart = gemm_spec.parts > 1 and gemm_spec.n % columns > 0
    return [f"{gemm_spec.parts} parts of n={gemm_spec.n}, no multiple of {columns}"] * apart + \
        matrix_problems(spec, s, arch)


def matrix_problems(spec: QuantGemmSpec, s: QuantMma, arch: str) -> list[str]:
    """The same where each part begins with a tile of its own."""
    gemm_spec = spec.gemm
    if s.swap: return ["swapped: the matrix is operand B"]
    plan, least = QuantMmaPlan.of(spec, s), 16 * s.warps_n * gemm_spec.parts
    out = mma.extent_problems("block_m", s.block_m, s.warps_m, 1, gemm_spec.a)
    if s.block_n % least: out.append(f"block_n={s.block_n} is not a multiple of {least}")
    if s.threads > 1024 or s.threads & (s.threads - 1):
        out.append(f"{s.threads} threads are above 1024, or not a power of 2")
    if (padded := spec.type.pad_columns(gemm_spec.k)) % s.block_k:
        out.append(f"{padded} columns, k={gemm_spec.k} in whole units, are no multiple of "
                   f"block_k={s.block_k}")
    if gemm_spec.k % s.block_k and s.splits > 1: out.append(f"splits of k={gemm_spec.k}, no whole stages")
    if s.block_k * 2 not in (64, 128, 256): out.append(f"block_k={s.block_k} is not 32, 64 or 128")
    if not 2 <= s.depth <= 8: out.append(f"{s.depth} stages are not 2 to 8")
    if s.splits > plan.iterations: out.append(f"{s.splits} splits of {plan.iterations} steps")
    if out: return out
    out += mma.copy_problems(s, "block_m", s.block_m, gemm_spec.a) + stages.problems(spec, plan.boxes,
                                                                                      s.block_k)
    most = limits.SMEM_BYTES[arch]
    if (needed := plan.smem_bytes) > most:
        out.append(f"{s.depth} stages × {plan.stage_bytes} B, or what is stored from, = {needed} B of shared "
                   f"memory, {arch} has {most}")
    if plan.sums > MOST_SUMS: out.append(f"{plan.sums} sums a thread, at most {MOST_SUMS}")
    return out


# rows of activations, columns, warps along both
TILES = ((128, 128, 2, 4), (64, 128, 1, 4), (32, 128, 1, 4), (16, 128, 1, 4), (64, 64, 2, 2), (32, 64, 1, 4),
         (16, 64, 1, 4), (16, 32, 1, 2), (16, 16, 1, 1))
WAVE = 1            # of tiles, which splits fill
STAGES = (4, 3, 2)


def candidates(spec: QuantGemmSpec, gpu: GPU) -> Iterator[QuantMma]:
    """Yields the candidates that are not twice as large as the matmul, with splits where tiles are few."""
    m, n = spec.gemm.m, spec.gemm.n
    sms, parts = gpu.sm_count or 108, spec.gemm.parts
    for rows, columns, along_m, along_n in TILES:
        if (rows >= 2 * m and rows > 16) or (columns >= 2 * n and columns > 16): continue
        for block_k in (64, 32):
            for depth in STAGES:
                s = QuantMma().block(rows, columns * parts).k(block_k).warps(along_m, along_n).stages(depth)
                tiles = -(-m // rows) * -(-n // columns)
                splits = min(sms * WAVE // tiles, QuantMmaPlan.of(spec, s).iterations // 4)
                if splits > 1 and not spec.gemm.symbolic: yield s.split(splits)
                yield s
