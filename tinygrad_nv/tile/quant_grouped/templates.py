"""The templates of grouped matmuls with quantised matrices on GPUs: gemv/ (few rows a group), wgmma/
(sm_90a), mma/. Their costs choose among them.

The costs are rough: they order schedules, also those of different templates. Expected numbers of groups and
tiles are those of grouped_gemm/cost.py. Fitted to predictions of launches of gpt-oss-120b's experts of MXFP4
on an H100, within 10 %: 1 to 64 tokens, wgmma 4 to 16384.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import TypeVar

from tinygrad_nv.quant.types import nbytes
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.gemm.spec import FLOAT16S
from tinygrad_nv.tile.gpu import STREAMING, GPUModel, gpu_model_for
from tinygrad_nv.tile.grouped_gemm.cost import Prediction, active, cheapest, tiles
from tinygrad_nv.tile.grouped_gemm.wgmma.plan import LINES, STORED
from tinygrad_nv.tile.quant_gemm import fragments
from tinygrad_nv.tile.quant_gemm.gemv.plan import REGISTERS
from tinygrad_nv.tile.quant_grouped.gemv import plan as gemv
from tinygrad_nv.tile.quant_grouped.mma import plan as mma
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedGemv, QuantGroupedMma, QuantGroupedWgmma
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.quant_grouped.wgmma import plan as wgmma
from tinygrad_nv.tile.quant_grouped.wgmma.plan import QuantGroupedPlan
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU, AnyTemplate, Family, Template, lazy_build, legality

ISSUED = 128            # instructions of threads that an SM issues in a cycle
CONVERTED = 3.5         # instructions of a gemv for each weight, its loads, factors and mmas among them
SCALED = 4.5            # of mma, which multiplies each with its scale
ALONE = 2.0             # times what is issued, that a lone warp of a scheduler takes
BEGIN_S = 1.5e-6        # from a CTA's begin until its first codes arrive
UNEVEN = 1.15           # times HBM's time that loads to registers take
COPIED = 1.08           # that copies of mma take
PLACED = 4.0            # of wgmma
STAGE = 60              # cycles of its barriers
MULTIPLIED = 0.95       # of wgmmas' time that is left beside what makes their operands
IN_FLIGHT, WAITED = 0.25, 38    # of it, and cycles of 16 columns, where each wgmma is short
SPREAD = 0.5            # of a wave: as many tiles more than expected as groups are dealt
MMA_REGISTERS = 168     # of a thread of mma
C = TypeVar("C", bound=Schedule)


def hbm_seconds(spec: QuantGroupedSpec, model: GPUModel) -> float:
    """Everything once."""
    one = spec.grouped
    read = active(one) * one.halves * nbytes(spec.type, one.columns, one.k)
    rows = (min(one.x_rows, one.rows) * one.k + one.rows * one.columns) * one.dtype.itemsize
    return (read + rows) / (STREAMING * model.hbm_bytes_per_s)


def _issue_rate(threads: int) -> int:
    """Instructions of threads a cycle; CTAs of fewer warps than an SM has schedulers leave some idle."""
    return min(ISSUED, threads)


def of_gemv(spec: QuantGroupedSpec, s: QuantGroupedGemv, gpu: GPU) -> Prediction:
    """Returns the cost of CTAs whose codes are on their way only once they know their group."""
    plan, model, one = gemv.plan_of(spec, s), gpu_model_for(gpu.arch, gpu.sm_count), spec.grouped
    count = tiles(one, s.rows)
    held = max(1, min(gemv.ctas_an_sm(plan), model.smem_of_sm // plan.smem_bytes))
    waves = max(1.0, count * plan.blocks_n * plan.splits / (model.sm_count * held))
    weights = count * one.halves * plan.blocks_n * plan.block_n * spec.type.pad_columns(one.k)
    cycles = model.sm_count * model.clock_hz * model.sustained
    issued = weights * CONVERTED / (_issue_rate(s.threads) * cycles)
    hbm = UNEVEN * hbm_seconds(spec, model) + waves * BEGIN_S
    return Prediction(issued, hbm, 0.0, model.launch_s + model.load_s)


def of_mma(spec: QuantGroupedSpec, s: QuantGroupedMma, gpu: GPU) -> Prediction:
    """Returns the cost of CTAs that each have a ring of stages, and operands of a warp's columns made for its
    rows alone."""
    one, plan = spec.grouped, mma.plan_of(spec, s)
    model = gpu_model_for(gpu.arch, gpu.sm_count)
    count = tiles(one, s.block_m) * -(-one.columns // plan.columns)
    made = s.block_n * s.block_k * s.warps_m * SCALED / _issue_rate(s.threads)
    multiplied = s.block_m * s.block_n * s.block_k / (model.tensor_fma * model.mma_share)
    step = max(made, multiplied) + 0.2 * min(made, multiplied)
    cycles = model.clock_hz * model.sustained
    held = max(1, min(model.smem_of_sm // plan.ring_bytes, REGISTERS // (s.threads * MMA_REGISTERS)))
    alone = plan.iterations * (ALONE * step / cycles + model.load_s / (s.depth - 1)) + BEGIN_S
    fed = ceil(count / (model.sm_count * held)) * alone
    computing = ceil(count / model.sm_count) * plan.iterations * step / cycles
    hbm = max(COPIED * hbm_seconds(spec, model), fed)
    return Prediction(computing, hbm, 0.0, model.launch_s + model.load_s)


def of_wgmma(spec: QuantGroupedSpec, s: QuantGroupedWgmma, gpu: GPU) -> Prediction:
    """Returns the cost of persistent CTAs, whose operands are made for all rows of a tile."""
    plan, model = QuantGroupedPlan.of(spec, s), gpu_model_for(gpu.arch, gpu.sm_count)
    count = tiles(spec.grouped, plan.tokens) * plan.tiles_across
    made = PLACED * s.block_m * s.block_k / ISSUED
    multiplied = s.block_m * s.block_n * s.block_k / model.tensor_fma
    # what makes operands is issued between wgmmas rather than beside them (ptx/timing/gpus: beside_wgmma)
    step = STAGE + made + max(MULTIPLIED * multiplied, IN_FLIGHT * multiplied + WAITED * plan.steps)
    ending = LINES + plan.tokens * plan.tile_columns * spec.grouped.out.itemsize / STORED
    whole = count / model.sm_count
    waves = max(ceil(whole), whole + SPREAD if whole > 1 else 1.0)
    computing = waves * (plan.iterations * step + ending) / model.clock_hz + BEGIN_S
    fed = waves * plan.iterations * model.load_s / s.depth
    hbm = max(COPIED * hbm_seconds(spec, model) * max(waves / whole, 1.0) + BEGIN_S, fed)
    l2 = count * plan.iterations * plan.stage_bytes / model.l2_bytes_per_s
    return Prediction(computing, hbm, l2, model.launch_s + model.load_s)


def _whole(own: Callable[[QuantGroupedSpec, C, str], Sequence[str]]
           ) -> Callable[[QuantGroupedSpec, C, GPU], list[str]]:
    """Why a template cannot have a schedule; empty when it can."""
    def find_problems(spec: QuantGroupedSpec, s: C, arch: str) -> tuple[str, ...]:
        asked = fragments.problems(spec.type)
        if spec.grouped.dtype not in FLOAT16S: asked.append(f"activations of {spec.grouped.dtype.name}")
        if spec.int8: asked.append("activations of int8")
        return (*asked, *(() if asked else own(spec, s, arch)))
    return legality(find_problems)


GEMV = Template("quant_grouped_gemv", QuantGroupedSpec, QuantGroupedGemv, _whole(gemv.problems),
                gemv.candidates, lazy_build("tinygrad_nv.tile.quant_grouped.gemv.kernel",
                                            "quant_grouped_gemv"),
                of_gemv)
WGMMA = Template("quant_grouped_wgmma", QuantGroupedSpec, QuantGroupedWgmma, _whole(wgmma.problems),
                 wgmma.candidates,
                 lazy_build("tinygrad_nv.tile.quant_grouped.wgmma.kernel",
                            "quant_grouped_wgmma"), of_wgmma)
MMA = Template("quant_grouped_mma", QuantGroupedSpec, QuantGroupedMma, _whole(mma.problems), mma.candidates,
               lazy_build("tinygrad_nv.tile.quant_grouped.mma.kernel", "quant_grouped_mma"), of_mma)
TEMPLATES: tuple[AnyTemplate, ...] = (GEMV, MMA, WGMMA)


def _default(spec: QuantGroupedSpec, gpu: GPU) -> Schedule | None:
    return cheapest(TEMPLATES, spec, gpu)


FAMILY = Family("quant_grouped", TEMPLATES, choose, defaults=_default)
