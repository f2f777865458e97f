"""Legality of `quant_mma`: what it asks of a schedule."""
from __future__ import annotations

from tinygrad_nv.tile import limits
from tinygrad_nv.tile.gemm.mma import legality as gemm
from tinygrad_nv.tile.quant_gemm import stages
from tinygrad_nv.tile.quant_gemm.mma.plan import QuantMmaPlan
from tinygrad_nv.tile.quant_gemm.schedules import QuantMma
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec

MOST_SUMS = 128     # of a thread, beside operands in the making


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
    out = gemm.extent_problems("block_m", s.block_m, s.warps_m, 1, gemm_spec.a)
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
    out += gemm.copy_problems(s, "block_m", s.block_m, gemm_spec.a) + stages.problems(spec, plan.boxes,
                                                                                      s.block_k)
    most = limits.SMEM_BYTES[arch]
    if (needed := plan.smem_bytes) > most:
        out.append(f"{s.depth} stages × {plan.stage_bytes} B, or what is stored from, = {needed} B of shared "
                   f"memory, {arch} has {most}")
    if plan.sums > MOST_SUMS: out.append(f"{plan.sums} sums a thread, at most {MOST_SUMS}")
    return out
