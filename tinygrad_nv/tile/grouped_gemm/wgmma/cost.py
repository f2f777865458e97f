"""Cost of `grouped_wgmma`."""
from __future__ import annotations

from math import ceil

from tinygrad_nv.tile.gemm.work import INSTRUCTION_BYTES, SMEM_BYTES_PER_CYCLE
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.grouped_gemm.cost import Prediction, hbm_seconds, tiles
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedWgmma
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.grouped_gemm.wgmma.plan import GroupedPlan
from tinygrad_nv.tile.template import GPU

PROMOTED = 0.3          # of wgmmas' time that sums of fp8 take, which are added in float32
L2_IN_STEP = 1.05       # times the rate of L2: neighbours read the same columns in step; fitted, too
STEP = 60               # cycles of a stage's barriers and issue that nothing hides
LINES = 400             # cycles until the first lines of an epilogue are stored
STORED = 32             # bytes of results a cycle of an epilogue
# of HBM, where gathered rows are wgmma's rows or `MANY` of them a tile. With this and `L2_IN_STEP` six
# matmuls of gathered rows, 1024 and 4096 tokens, get schedules within 3 % of the best that an H100 timed
MANY, GATHERED_HBM = 128, 1.05


def cost(spec: GroupedGemmSpec, s: GroupedWgmma, gpu: GPU) -> Prediction:
    """The prediction of a schedule."""
    plan, model = GroupedPlan.of(spec, s), gpu_model_for(gpu.arch, gpu.sm_count)
    count = tiles(spec, plan.tokens) * plan.tiles_across
    rate = model.tensor_fma * model.tensor_scale(spec.dtype, False)
    left = ceil(s.block_m / 64) * (64 + s.block_n) * plan.steps * INSTRUCTION_BYTES
    multiplied = s.block_m * s.block_n * s.block_k / rate * (1 + PROMOTED * plan.needs_promotion)
    step = max(multiplied, (left + plan.stage_bytes) / SMEM_BYTES_PER_CYCLE,
               STEP)
    ending = 0 if plan.pingpong else LINES + plan.tokens * plan.tile_columns * spec.out.itemsize / STORED
    # an SM has whole tiles, and at most a ring of them on its way
    waves = ceil(count / model.sm_count)
    computing = waves * (plan.iterations * step + ending) / model.clock_hz / model.sustained
    fed = waves * plan.iterations * model.load_s / s.depth
    uneven = waves * model.sm_count / count if count > model.sm_count else 1.0
    hbm = max(hbm_seconds(spec, model) * uneven, fed)
    if plan.gathers_rows and (not s.swap or plan.tokens >= MANY): hbm *= GATHERED_HBM
    l2 = count * plan.iterations * plan.stage_bytes / (L2_IN_STEP * model.l2_bytes_per_s)
    return Prediction(computing, hbm, l2, model.launch_s + model.load_s)
