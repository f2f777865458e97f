"""Tiles: what is computed, how, and the kernels that do it.

A folder a family: gemm/ attention/ decode/ norm/ sampling/ embedding/ kv_append/. Each has its spec (what is
computed), its schedules (how: legality, candidates, defaults, cost) and a folder for each template. What
families share is here. Read in this order:

  expression.py      what happens to a sum before it is stored
  schedule.py        `Schedule`: template, tiles, warps and stages
  kernel.py          a finished kernel: PTX and, by launch.py, how it is launched
  layout.py          where elements lie in shared memory; wgmma_tiles.py: operands of wgmma there
  ops.py             how a CTA copies tiles to shared memory; fragments.py: how a warp reads them for mma.sync
  pipeline.py        a ring of stages between a thread that starts copies of TMA and the warps that read
  tile_scheduler.py  which tile a CTA makes
  epilogue.py        expressions in instructions; lanes.py: one element or two; access.py: in memory
  store.py           from sums to the result in memory; staging.py: by way of shared memory
  gpu.py             figures of GPUs, for the cost model
  database.py        schedules that were found by trying, as spec_json.py writes them

Then gemm/, whose spec.py, legality.py, choose.py, cost.py and tune.py the others follow. Nothing here knows
of tinygrad's graphs. A template's kernel runs on the emulator as it runs on a GPU.
"""
