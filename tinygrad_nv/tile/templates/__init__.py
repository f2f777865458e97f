"""Kernel families: each makes PTX from a spec and a schedule, for the architectures it names.

  gemm_mma.py        mma.sync with a ring of cp.async stages: sm_80 and later, any strides
  gemm_wgmma.py      wgmma with TMA and warp specialisation: sm_90a
    wgmma_plan.py      its tiles, instructions and counts
    wgmma_tiles.py     its operands in shared memory, and their tensor maps
    wgmma_walk.py      which tiles a CTA makes
    wgmma_load.py      the producer's copies
    wgmma_multiply.py  the consumers' main loop
    wgmma_meet.py      sums of one tile from several CTAs
    wgmma_store.py     from the sums to the result
  gemv.py            few rows: every byte of the weights once, at the speed of memory
    gemv_plan.py       who reads which bytes of the weights, and what that takes
    gemv_words.py      chunks in registers
    gemv_sums.py       four ways to multiply them
    gemv_finish.py     from the sums of lanes to the result
  flash_mma.py       attention with mma.sync (FlashAttention-2): sm_80 and later
    flash_mma_copy.py  rows of q, keys and values to shared memory
    flash_rest.py      of a ragged batch, rows that belong to no sequence
  flash_fma.py       attention in float32, without tensor cores: sm_80 and later
    flash_fma_products.py    what a lane multiplies
    flash_fma_softmax.py     exponents of differences
    flash_fma_store.py       warps that share rows; the result, and l
  flash_wgmma.py     attention with wgmma and TMA (FlashAttention-3): sm_90a
    flash_wgmma_plan.py      its tiles, registers and bytes
    flash_wgmma_walk.py      which tiles a CTA makes
    flash_wgmma_blocks.py    which blocks of columns its rows see
    flash_wgmma_load.py      the producer's copies
    flash_wgmma_multiply.py  the consumers' main loop
    flash_wgmma_fp8.py       operands of 8 bits: scales, weights, values turned
    flash_wgmma_store.py     the result, and l
  flash_backward_mma.py    its gradient with mma.sync (FlashAttention-2): sm_80 and later
    flash_backward_rows.py   which blocks of rows see a block of keys, and how they come
    flash_backward_score.py  scores and their derivatives, transposed
    flash_backward_add.py    dq, added to memory
    flash_backward_turns.py  sums of dq in one order
  flash_backward_wgmma.py  its gradient with wgmma and TMA (FlashAttention-3): sm_90a
    flash_backward_wgmma_plan.py      its tiles, registers and bytes
    flash_backward_wgmma_blocks.py    which blocks of rows see its keys
    flash_backward_wgmma_load.py      the producers' copies
    flash_backward_wgmma_multiply.py  the consumers' main loop
    flash_backward_wgmma_halves.py    the same for heads above 128
    flash_backward_wgmma_weights.py   from products to p and ds
    flash_backward_wgmma_queries.py   dq, added to memory
    flash_backward_wgmma_store.py     dk and dv
  decode.py          attention of few new rows over keys and values in pages: split-KV, and a combine step
    decode_plan.py     who reads which keys, and what lies where
    decode_split.py    the first kernel: one split
    decode_copy.py     pages to shared memory
    decode_operands.py fragments, also of keys and values of 8 bits
    decode_rows.py     rows, scores, softmax
    decode_merge.py    warps of a CTA, splits of a request: the second kernel
  kv_append.py       new keys and values, rotated and rounded, into their pages
  threshold.py       of rows of logits, the largest by number or by mass, without a sort
    threshold_sift.py  of long rows, what is above a floor, in shared memory
  choice.py          noise, and the largest with it: a token for each row
  count.py           how often tokens were chosen
  norm.py            rows: norms, softmax, argmax, elements without statistics
    norm_plan.py       who has which elements
  embedding.py       rows of a table by number

`build` chooses by the schedule's template. Templates are imported when they are asked for.
"""
from __future__ import annotations

from importlib import import_module

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.ptx.gpcs import Clusters
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.spec import GemmSpec

FAMILIES = {"mma": "gemm_mma", "wgmma": "gemm_wgmma", "gemv": "gemv"}
FILLING = ("wgmma",)  # their grids depend on how many CTAs run at once


def build(spec: GemmSpec, schedule: Schedule, arch: str, sm_count: int = 132,
          clusters: Clusters = ()) -> GemmKernel:
    """The kernel of a product, by the schedule's template, for a GPU with so many multiprocessors, which has
    room for so many `clusters` at once (left out: as ptx/gpcs.py has it). Raises `ScheduleError` for an
    impossible one."""
    family = FAMILIES.get(schedule.template)
    if family is None: raise ScheduleError(f"template {schedule.template!r}", f"one of {', '.join(FAMILIES)}")
    make = getattr(import_module(f"tinygrad_nv.tile.templates.{family}"), family)
    gpu = (sm_count, clusters) if schedule.template in FILLING else ()
    made: GemmKernel = make(spec, schedule, arch, *gpu)
    return made
