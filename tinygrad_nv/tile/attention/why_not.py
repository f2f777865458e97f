"""Why no template has an attention, or its gradient, on a GPU, in words for a reader."""
from __future__ import annotations

from tinygrad_nv.tile.attention.backward_mma.legality import dtype_problems
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.schedules import FlashMma
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

SMALL = FlashMma().block(16, 32).warps(1)  # whose problems are told of a ragged batch


def why_not(spec: AttentionSpec | BackwardSpec, gpu: GPU) -> str:
    """The reason."""
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
