"""Schedules of `gemv`: `problems`, what it asks of one; `candidates`, those worth trying first: warps with
some columns and steps each, side by side or along K; `GemvCost`. float32 is multiplied in float32, with or
without `tf32`."""
from __future__ import annotations

from math import log2

from tinygrad_nv.tile import limits
from tinygrad_nv.tile.gemm.cost import Cost, resident_ctas
from tinygrad_nv.tile.gemm.gemv.plan import (
    MOST_CLUSTERED,
    MOST_LOADED,
    MOST_SUMS,
    OTHER_REGISTERS,
    REGISTERS,
    GemvPlan,
    turns,
)
from tinygrad_nv.tile.gemm.schedules import MOST_ROWS, Gemv
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gemm.work import Ending, Work, ending_cycles
from tinygrad_nv.tile.gpu import STREAMING, GPUModel
from tinygrad_nv.tile.limits import MOST_GRID, SMEM_BYTES
from tinygrad_nv.tile.template import GPU


def problems(spec: GemmSpec, schedule: Gemv, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    s = schedule
    if s.swap and spec.parts > 1: return [f"the transposed matmul of {spec.parts} parts"]
    if s.swap and spec.symbolic: return ["the transposed matmul would have symbolic columns"]
    if (few := spec.n if s.swap else spec.m) > MOST_ROWS:
        hint = "; n is not: swapped()" if not s.swap and spec.n <= MOST_ROWS else ""
        return [f"{'n' if s.swap else 'm'}={few} is above {MOST_ROWS}{hint}"]
    if s.threads > 1024: return [f"{s.warps_m} warps are {s.threads} threads, at most 1024"]
    plan = GemvPlan.of(spec, s)
    return _block_problems(plan) or _extent_problems(plan, arch)


def _block_problems(plan: GemvPlan) -> list[str]:
    s, out = plan.schedule, []
    if s.block_n % plan.granule:
        out.append(f"block_n={s.block_n} is not a multiple of the {plan.granule} columns of a warp")
    if s.block_k % plan.step:
        out.append(f"block_k={s.block_k} is not a multiple of the {plan.step} of a warp's step")
    return out


def _extent_problems(plan: GemvPlan, arch: str) -> list[str]:
    """Returns the problems of registers, shared memory, grid and offsets, with tiles that are multiples."""
    spec, s, out = plan.spec, plan.schedule, []
    if plan.load_registers > MOST_LOADED:
        out.append(f"{plan.steps} steps × {plan.rows * plan.depth} chunks × {spec.parts} parts × "
                   f"{-(-plan.chunk // 4)} = {plan.load_registers} registers of loads, at most {MOST_LOADED}")
    if plan.sums > MOST_SUMS:
        out.append(f"{plan.warp_n} columns of a warp × {spec.m} rows × {spec.parts} parts = {plan.sums} sums "
                   f"a lane, at most {MOST_SUMS}")
    most = min(255, REGISTERS // s.threads // 8 * 8)
    if plan.registers > most:
        out.append(f"{plan.sums} sums + {plan.load_registers} of loads + {plan.x_registers} of activations + "
                   f"{OTHER_REGISTERS} = {plan.registers} registers, {s.threads} threads have {most} each")
    if plan.smem_bytes > limits.SMEM_BYTES[arch]:
        needed = f"{spec.m} rows × {plan.span} of K × {plan.itemsize} B = {plan.x_bytes} B" \
            if plan.x_bytes >= plan.sums_bytes else f"sums of {plan.warps_k} warps = {plan.sums_bytes} B"
        out.append(f"{needed} of shared memory, {arch} has {limits.SMEM_BYTES[arch]}")
    iterations = plan.full + (plan.tail > 0)
    if s.splits > iterations:
        out.append(f"{s.splits} splits of {spec.k} / {s.block_k} = {iterations} iterations")
    for name, count in (("splits", plan.splits), ("matrices", spec.matrices)):
        if count > MOST_GRID: out.append(f"{count} {name} are above {MOST_GRID}")
    if plan.reach_bytes >= 1 << 31:
        out.append(f"loads of an iteration are {plan.reach_bytes} B apart, at most {(1 << 31) - 1}")
    return out


COLUMNS = 64        # of a CTA, at best: each reads the activations again, and SMs should have equally many
LONG = 1024         # of K, above which each warp is to have two iterations
LEAST_COLUMNS = 4   # below which that is half of what it reads


def candidates(spec: GemmSpec, gpu: GPU) -> list[Gemv]:
    """None for many rows; split where the activations do not fit in half of the shared memory. Where K is
    long enough, each warp has an iteration to load while it multiplies another."""
    made, base = [], Gemv().columns(64)
    if turns(spec): base = base.swap_operands()
    elif spec.m > MOST_ROWS: return []
    plan = GemvPlan.of(spec, base)
    nbytes = plan.spec.m * spec.k * spec.a.dtype.itemsize
    base = base.split(-(-nbytes * 2 // SMEM_BYTES[gpu.arch]))
    widths = [plan.granule << i for i in range(6) if plan.granule << i >= LEAST_COLUMNS]
    for warps in (8, 4):
        for columns in sorted(widths, key=lambda columns: abs(log2(columns / COLUMNS))):
            for steps in (1, 2, 4):
                made.append(base.columns(columns).k(steps * plan.step).warps(warps))
    if plan.spec.k < LONG: return made
    busy = [s for s in made if 2 * GemvPlan.of(spec, s).warps_k * s.block_k * s.splits <= plan.spec.k]
    return busy or made


STORE_OPERATIONS = 10.0
ESTIMATED_REGISTERS = 64                      # of a thread, about
# of the rate of one row that several rows reach: of 84 schedules on an H100, 2 to 16 rows, the best took 1.00
# to 1.12 and half of them more than 1.3 times what one row's rate predicts
SEVERAL_ROWS = 0.8


class GemvCost(Cost[Gemv]):
    """Weights stream from HBM past L1; what multiplies them hardly matters."""
    hbm_share = STREAMING
    streams = True

    def flops_per_s(self, spec: GemmSpec, gpu_model: GPUModel) -> float:
        return 2.0 * gpu_model.fp32_fma * gpu_model.sm_count * gpu_model.clock_hz

    def streaming(self, spec: GemmSpec, s: Gemv) -> float:
        return self.hbm_share * (SEVERAL_ROWS if min(spec.m, spec.n) > 1 else 1.0)

    def work(self, spec: GemmSpec, s: Gemv, gpu_model: GPUModel, end: Ending) -> Work:
        """A weight goes to the tensor cores, or is widened and multiplied for each row."""
        plan = GemvPlan.of(spec, s)
        lanes = s.tile(spec).width * s.block_k * (1.0 if plan.tensor else 1.5 + 1.25 * plan.spec.m)
        finish = ending_cycles(min(spec.m, spec.n) * s.block_n, end, STORE_OPERATIONS)
        return Work(0, 0, lanes / gpu_model.fp32_fma, finish, plan.warps_k)

    def resident(self, spec: GemmSpec, s: Gemv, gpu_model: GPUModel, registers: int) -> int:
        smem = 1024 + spec.a.dtype.itemsize * (min(spec.m, spec.n) * spec.k // s.splits)
        return resident_ctas(gpu_model, s.threads, smem, registers or ESTIMATED_REGISTERS)

    def cluster_ctas(self, s: Gemv, arch: str) -> int:
        return s.splits if s.splits <= MOST_CLUSTERED and arch == "sm_90a" else 1

    def flags(self, s: Gemv, arch: str) -> bool:
        """A few splits meet in a cluster, where there are any."""
        return s.splits > self.cluster_ctas(s, arch)
