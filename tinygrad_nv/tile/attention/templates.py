"""The templates of attention and of its gradient, those that are liked best first; their schedules, the
better known ones before the others, and why no template has a spec.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.backward_mma.plan import problems as backward_mma_problems
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec, dtype_problems
from tinygrad_nv.tile.attention.backward_wgmma.plan import problems as backward_wgmma_problems
from tinygrad_nv.tile.attention.fma.plan import problems as fma_problems
from tinygrad_nv.tile.attention.mma.plan import problems as mma_problems
from tinygrad_nv.tile.attention.schedules import BackwardMma, BackwardWgmma, FlashFma, FlashMma, FlashWgmma
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.attention.wgmma.plan import problems as wgmma_problems
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.order import OVER_ROWS, Ordered
from tinygrad_nv.tile.template import GPU, AnyTemplate, Family, Template, lazy_build, legality
from tinygrad_nv.tile.templates import TABLE

Tile = TypeVar("Tile")

# of heads up to so many elements: rows, columns, warps, stages
MMA = {64: ((128, 64, 4, 2), (64, 64, 4, 2)),
       128: ((128, 64, 8, 2), (64, 64, 4, 2)),
       192: ((64, 64, 4, 2),),
       256: ((64, 64, 4, 2), (64, 32, 4, 2))}
FEW = ((64, 32, 4, 2), (32, 32, 2, 2), (16, 32, 1, 2))

# rows, columns: 64 rows for each consumer. FlashAttention-3's tiles as far as registers go; those after the
# first are for scores that are evaluated. More than 128 columns are for what has no mask, where no block is
# half empty
WGMMA = {64: ((192, 128), (192, 80), (128, 128), (128, 112)),
         96: ((128, 128), (128, 112)),
         128: ((128, 128), (128, 176), (128, 112)),
         192: ((128, 112), (128, 96), (128, 64)),
         256: ((128, 64), (128, 80), (128, 48))}
FEW_WGMMA = ((64, 128), (64, 112), (64, 80), (64, 48))
# of 8 bits, where blocks of 128 keys often have a scale
WGMMA8 = {64: ((128, 192), (128, 128), (128, 64)),
          192: ((128, 128), (128, 64)),
          256: ((128, 64),)}
FEW_WGMMA8 = ((64, 128), (64, 64), (64, 32))
# float32. Rows, columns, warps along rows and along columns: 32 rows of a warp as far as registers go
FMA = {64: ((128, 32, 4, 1),),
       96: ((128, 32, 4, 1),),
       128: ((128, 16, 4, 1), (64, 16, 2, 1)),
       256: ((64, 32, 4, 1), (64, 16, 4, 1))}
FEW_FMA = ((64, 64, 2, 2), (32, 64, 1, 4), (32, 32, 2, 2), (32, 16, 2, 1), (16, 64, 1, 4), (16, 32, 1, 4),
           (16, 16, 1, 2))
# of heads up to so many elements: rows, keys, warps along keys, warps that share keys; two stages
BACKWARD_MMA = {64: ((64, 128, 8, 1), (64, 64, 4, 1), (32, 64, 4, 1)),
                96: ((64, 128, 4, 2), (64, 64, 4, 1), (32, 64, 4, 1)),
                128: ((64, 128, 4, 2), (64, 64, 4, 2), (32, 64, 4, 1)),
                192: ((64, 64, 4, 2), (32, 64, 4, 2)),
                256: ((32, 64, 4, 2),)}
BACKWARD_FEW = ((64, 64, 4, 1), (32, 32, 2, 1), (32, 32, 2, 2))
# of heads up to so many elements: rows, keys, warps, stages; the last for few keys, and for scores that take
# many registers
BACKWARD_WGMMA = {64: ((128, 128, 12, 2), (64, 128, 12, 2), (64, 64, 8, 2)),
                  128: ((64, 128, 12, 3), (64, 128, 12, 2), (64, 64, 12, 2), (64, 64, 8, 2)),
                  256: ((64, 64, 12, 2),)}
SMALL = FlashMma().block(16, 32).warps(1)  # whose problems are told of a ragged batch
FOLDER = "tinygrad_nv.tile.attention"
MANY = 1024     # rows, for which candidates come in the order of what they are made for


def fma_candidates(spec: AttentionSpec, gpu: GPU) -> Iterator[FlashFma]:
    """Yields the schedules of float32: no more rows than there are, in blocks of 16."""
    for m, n, along_m, along_n in (*_upto(FMA, _widest(spec)), *FEW_FMA) if _exact(spec) else ():
        if m < 2 * spec.s_q or m == 16: yield FlashFma().block(m, n).warps(along_m, along_n)


def wgmma_candidates(spec: AttentionSpec, gpu: GPU) -> Iterator[FlashWgmma]:
    """Yields the schedules of sm_90a: no more rows than there are, in blocks of 64."""
    if _exact(spec) or gpu.arch != "sm_90a": return
    tiles, few = (WGMMA8, FEW_WGMMA8) if spec.scales is not None else (WGMMA, FEW_WGMMA)
    # those of which more than a tenth of the rows are none come after the others
    ordered = sorted(_upto(tiles, _widest(spec)), key=lambda tile: -spec.s_q % tile[0] > spec.s_q // 10)
    for m, n in (*ordered, *few):
        if m >= 64 + spec.s_q or (n > 128 and not spec.band.full): continue
        schedule = FlashWgmma().block(m, n).warps(m // 16 + 4)
        yield schedule.pingpong() if m > 64 and not _one_scale(spec) else schedule


def mma_candidates(spec: AttentionSpec, gpu: GPU) -> Iterator[FlashMma]:
    """Yields the schedules of 16-bit operands: no more rows than there are, in blocks of 16."""
    for m, n, warps, stages in () if _exact(spec) else (*_upto(MMA, _widest(spec)), *FEW):
        if m < 2 * spec.s_q or m == 16: yield FlashMma().block(m, n).warps(warps).stages(stages)


def _one_scale(spec: AttentionSpec) -> bool:
    """Tells whether operands of 8 bits have a scale for each head: softmax takes longer than the matmuls that
    it would lie under in ping-pong. Scales of blocks add float32 instructions, which ping-pong spreads."""
    return spec.scales is not None and not any(each.block for each in spec.scales)


def _exact(spec: AttentionSpec) -> bool: return spec.q.dtype == dtypes.float32


def _widest(spec: AttentionSpec) -> int: return max(spec.d, spec.d_v)


def _upto(table: dict[int, tuple[Tile, ...]], d: int) -> tuple[Tile, ...]:
    """The entry of the narrowest heads that have `d` elements."""
    return next(tiles for most, tiles in table.items() if d <= most)


def backward_wgmma_candidates(spec: BackwardSpec, gpu: GPU) -> Iterator[BackwardWgmma]:
    """Yields the schedules of sm_90a: no more keys than there are, in blocks of 64."""
    tiles = next((tiles for most, tiles in BACKWARD_WGMMA.items() if _widest(spec.forward) <= most), ())
    for m, n, warps, stages in tiles if gpu.arch == "sm_90a" else ():
        if n < 64 + spec.forward.s_kv: yield BackwardWgmma().block(m, n).warps(warps).stages(stages)


def backward_mma_candidates(spec: BackwardSpec, gpu: GPU) -> Iterator[BackwardMma]:
    """Yields the schedules of mma.sync: no more keys than there are, in blocks of 32."""
    tiles = next(tiles for most, tiles in BACKWARD_MMA.items() if _widest(spec.forward) <= most)
    for m, n, warps, sharing in (*tiles, *BACKWARD_FEW):
        if n < 2 * spec.forward.s_kv or n == 32: yield BackwardMma().block(m, n).warps(warps, sharing)


def why_not(spec: AttentionSpec | BackwardSpec, gpu: GPU) -> str:
    """Why no template has an attention, or its gradient, on a GPU, in words for a reader."""
    if isinstance(spec, BackwardSpec):
        words = f"no template for the gradient of {_heads(spec.forward, gpu)}"
        return "; ".join(dtype_problems(spec)) or words
    if spec.is_ragged:
        words = "; ".join(TABLE.problems(spec, SMALL, gpu)) or f"d {spec.d} needs more shared memory"
        return f"no kernel for {short(spec.q.dtype)} on {gpu.arch}: {words}"
    if spec.scales is not None:
        return f"no kernel for e4m3 with scales of {spec.scales[0].block} rows on {gpu.arch}: flash_wgmma " \
               "is for sm_90a, with a scale for whole times 16 rows and 32 columns"
    return f"no template for {_heads(spec, gpu)}"


def _heads(spec: AttentionSpec, gpu: GPU) -> str:
    """An attention, and what is wrong with how wide its heads are."""
    words = f"d {spec.d}" + f" and {spec.d_v}" * (spec.d_v != spec.d)
    odd = spec.q.dtype.itemsize == 2 and bool(spec.d % 8 or spec.d_v % 8)
    words += " (not a multiple of 8)" * odd
    return f"{short(spec.q.dtype)} attention of {words} on {gpu.arch}"


@lru_cache(4096)
def choose_ordered(spec: AttentionSpec | BackwardSpec, gpu: GPU) -> Ordered | None:
    """The schedule of the class: its template and the keys of a block (order.py); None where no template
    takes an attention. Softmax is rescaled from block to block of keys, so that a row's bits depend on
    `block_n` and on the instruction. Both are those of an attention of many rows; the rows of a block, warps
    and stages are free."""
    if isinstance(spec, BackwardSpec):
        found = _first(spec, spec, gpu)
        return None if found is None else Ordered(found[1], OVER_ROWS)
    many = spec if spec.documents else replace(spec, s_q=max(spec.s_q, MANY))
    if (made := _first(many, spec, gpu)) is None: return None
    template, wide = made
    fitting = [s for s in template.candidates(spec, gpu)
               if s.block_n == wide.block_n and not template.problems(spec, s, gpu)]
    words = f"{template.name}, keys in blocks of {wide.block_n} from the first"
    return Ordered(min(fitting, key=lambda s: _rows(s, spec), default=wide), words)


def _first(many: Any, spec: Any, gpu: GPU) -> tuple[AnyTemplate, Any] | None:
    """Returns the first of the candidates for `many` rows that is legal for a spec."""
    return next(((each, s) for each in FAMILY.templates if each.spec is type(spec)
                 for s in each.candidates(many, gpu) if not each.problems(spec, s, gpu)), None)


def _rows(s: Any, spec: AttentionSpec) -> int:
    """Rows that are computed for those that there are."""
    return -(-spec.s_q // s.block_m) * int(s.block_m)


FAMILY = Family("attention", (
    Template("flash_fma", AttentionSpec, FlashFma, legality(fma_problems), fma_candidates,
             lazy_build(f"{FOLDER}.fma.kernel", "flash_fma")),
    Template("flash_wgmma", AttentionSpec, FlashWgmma, legality(wgmma_problems), wgmma_candidates,
             lazy_build(f"{FOLDER}.wgmma.kernel", "flash_wgmma")),
    Template("flash_mma", AttentionSpec, FlashMma, legality(mma_problems), mma_candidates,
             lazy_build(f"{FOLDER}.mma.kernel", "flash_mma")),
    Template("flash_backward_wgmma", BackwardSpec, BackwardWgmma, legality(backward_wgmma_problems),
             backward_wgmma_candidates,
             lazy_build(f"{FOLDER}.backward_wgmma.kernel", "flash_backward_wgmma")),
    Template("flash_backward_mma", BackwardSpec, BackwardMma, legality(backward_mma_problems),
             backward_mma_candidates, lazy_build(f"{FOLDER}.backward_mma.kernel", "flash_backward_mma"))),
    choice=choose, refusal=why_not, determinism_class=choose_ordered)
