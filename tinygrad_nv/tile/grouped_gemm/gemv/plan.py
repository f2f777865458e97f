"""Plan of `grouped_gemv`, which follows from a spec and a schedule: the matmul of a tile, what is legal, what
is tried first, and what it takes."""
from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tinygrad_nv.tile.gemm.cost import CostModel, Prediction
from tinygrad_nv.tile.gemm.gemv import template as gemv
from tinygrad_nv.tile.gemm.gemv.plan import GemvPlan
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.grouped_gemm.cost import active, tiles
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedGemv
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.grouped_gemm.work import MOST_GROUPS, most_tiles
from tinygrad_nv.tile.limits import MOST_GRID
from tinygrad_nv.tile.template import GPU

ROWS = (1, 2, 4, 8, 16)     # of a tile
SPLITS = (2, 4, 8)          # of a sum
LONG = 1 << 27              # bytes of matrices above which the end of few waves costs more than small tiles
WAVES = 12                  # CTAs an SM then; 8.2 of them take 6 % longer than 16.4, as modelled


@lru_cache(1024)
def matmul_of(spec: GroupedGemmSpec, rows: int, matrices: int = 0) -> GemmSpec:
    """The matmul of a tile, whose rows are counted on the device; or of so many tiles, for the cost model."""
    batch = (matrices,) if matrices else ()
    a, b, out = ((each,) * len(batch) for each in (rows * spec.k, spec.n * spec.k, rows * spec.columns))
    return GemmSpec(rows, spec.columns, spec.k, Operand(spec.dtype, spec.k, 1, a),
                    Operand(spec.dtype, spec.k, 1, b), Result(spec.dtype, spec.columns, 1, out), batch,
                    parts=spec.halves, part=spec.columns * spec.k * (spec.halves - 1), symbolic=not matrices)


def plan_of(spec: GroupedGemmSpec, s: GroupedGemv) -> GemvPlan:
    """The plan of a tile."""
    return GemvPlan.of(matmul_of(spec, s.rows), s.gemv)


def problems(spec: GroupedGemmSpec, s: GroupedGemv, arch: str) -> list[str]:
    """Why the template cannot have a schedule; empty when it can."""
    if s.rows not in ROWS: return [f"tiles of {s.rows} rows, not {', '.join(map(str, ROWS))}"]
    out = gemv.problems(matmul_of(spec, s.rows), s.gemv, arch)
    if spec.groups > MOST_GROUPS: out.append(f"{spec.groups} groups, at most {MOST_GROUPS}")
    if (count := most_tiles(spec, s.rows)) > MOST_GRID: out.append(f"{count} tiles, at most {MOST_GRID}")
    return out


def usual_rows(spec: GroupedGemmSpec) -> tuple[int, ...]:
    """Rows of tiles worth trying: a group of the usual size is one, or has some to spare."""
    mean = spec.rows / active(spec)
    most = max(1, min(16, spec.x_rows if spec.gather else spec.rows))
    return tuple(rows for rows in ROWS if rows >= min(mean, 8) and (rows < 2 * most)) or (1,)


def candidates(spec: GroupedGemmSpec, gpu: GPU) -> list[GroupedGemv]:
    """Returns the candidates of a matmul of so few rows; of `LONG` matrices with `WAVES` CTAs an SM, where
    there are such; and those of `prefer_filling`."""
    some = active(spec)
    few = some * spec.n * spec.k * spec.dtype.itemsize < LONG
    least = 0.0 if few else WAVES * gpu_model_for(gpu.arch, gpu.sm_count).sm_count / some
    out: list[GroupedGemv] = []
    for rows in usual_rows(spec):
        made = [GroupedGemv.of(each, rows) for each in gemv.candidates(matmul_of(spec, rows), gpu)]
        out += [s for s in made if s.splits > 1 or -(-spec.columns // s.block_n) >= least] or made
        out += prefer_filling(spec, made, gpu)
    return out


def prefer_filling(spec: GroupedGemmSpec, made: list[GroupedGemv], gpu: GPU) -> list[GroupedGemv]:
    """Schedules of the fewest columns and the longest steps, whose CTAs leave SMs idle: more CTAs share a
    sum, up to one an SM. (x Aᵀ of 8 adapters of rank 16 and 8 rows, K = 14336, on an H100 as modelled: 4.9 µs
    by 8 CTAs a sum, 7.4 by 2.)"""
    if not made: return []
    sms = gpu_model_for(gpu.arch, gpu.sm_count).sm_count
    columns, steps = min(s.block_n for s in made), max(s.block_k for s in made)
    few = [s for s in made if (s.block_n, s.block_k) == (columns, steps)]
    return [each for s in few for splits in SPLITS if splits > s.splits
            and tiles(spec, s.rows) * -(-spec.columns // columns) * splits <= sms
            and not problems(spec, each := replace(s, splits=splits), gpu.arch)]


def cost(spec: GroupedGemmSpec, s: GroupedGemv, gpu: GPU) -> Prediction:
    """Returns the time of as many matmuls as there are tiles, of matrices of their own: those of a second
    tile of a group come from HBM again where they no longer lie in L2."""
    count = tiles(spec, s.rows)
    whole = matmul_of(spec, s.rows, max(1, round(count)))
    made = CostModel(whole, gpu_model_for(gpu.arch, gpu.sm_count)).predict(s.gemv)
    return replace(made, seconds=made.seconds * count / whole.matrices)
