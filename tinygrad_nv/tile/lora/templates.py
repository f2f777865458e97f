"""The template of adapters on GPUs: its schedule, what is legal, what is tried, and what it takes. Shrink is
a grouped matmul there (patterns/lora.py)."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from tinygrad_nv.tile.gemm.cost import Prediction
from tinygrad_nv.tile.gemm.mma import template as mma
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand
from tinygrad_nv.tile.grouped_gemm.mma import plan as grouped
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedMma
from tinygrad_nv.tile.grouped_gemm.work import MOST_GROUPS, most_tiles
from tinygrad_nv.tile.limits import MOST
from tinygrad_nv.tile.lora.spec import LoraExpandSpec
from tinygrad_nv.tile.template import GPU, Family, Template, lazy_build, legality


@dataclass(frozen=True)
class LoraExpandMma(GroupedMma):
    """mma.sync: `block_m` rows of an adapter by `block_n` columns of a segment."""
    template: ClassVar[str] = "lora_expand_mma"


def whole(spec: LoraExpandSpec, s: LoraExpandMma) -> GemmSpec:
    """The matmul of all tiles. Rows of h are as far apart as they are long, and a matmul reads `rank` columns
    of them."""
    made = grouped.whole(spec.grouped_gemm, s)
    return replace(made, a=Operand(spec.dtype, spec.pitch, 1))


def problems(spec: LoraExpandSpec, s: LoraExpandMma, arch: str) -> list[str]:
    """Why the template cannot have a schedule; empty when it can."""
    if s.splits > 1 or s.swap: return ["splits, or the transposed matmul"]
    if spec.matrix != spec.dtype: return ["rows and adapters of two dtypes"]
    out = mma.problems(whole(spec, s), s.mma, arch)
    if bad := [first for first, _ in spec.spans if first % s.block_n]:
        out.append(f"a segment begins at column {bad[0]}, within a tile of {s.block_n} columns")
    if spec.adapters >= MOST_GROUPS: out.append(f"{spec.adapters} adapters, at most {MOST_GROUPS - 1}")
    if (count := most_tiles(spec.grouped_gemm, s.block_m) * -(-spec.columns // s.block_n)) > MOST:
        out.append(f"{count} tiles, at most {MOST}")
    return out


def candidates(spec: LoraExpandSpec, gpu: GPU) -> list[LoraExpandMma]:
    """Rows of an adapter as there are, of 16 to 64, by columns of which segments are multiples: 128 where
    they are, in four warps. (8 rows of 8 adapters, rank 16, 28672 columns, on an H100 as modelled: 6.2 µs,
    with 64 columns 6.5, with 32 in one warp 9.7.)"""
    mean = spec.rows // min(spec.adapters, spec.rows)
    rows = 16 if mean <= 16 else 32 if mean <= 32 else 64
    k = next((k for k in (16, 32) if spec.rank <= k), 64)
    base = LoraExpandMma().k(k)
    made = [base.block(rows, n).warps(1, min(4, n // 16)) for n in (128, 64, 32, 16)]
    return [replace(each, depth=2) for each in made]


def cost(spec: LoraExpandSpec, s: LoraExpandMma, gpu: GPU) -> Prediction:
    """Returns the time of the grouped matmul."""
    return grouped.cost(spec.grouped_gemm, s, gpu)


EXPAND = Template("lora_expand_mma", LoraExpandSpec, LoraExpandMma, legality(problems),
                  candidates, lazy_build("tinygrad_nv.tile.lora.kernel", "lora_expand_mma"), cost)
FAMILY = Family("lora", (EXPAND,))
