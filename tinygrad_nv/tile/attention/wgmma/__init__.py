"""Attention with wgmma and TMA (FlashAttention-3): sm_90a.

  plan.py            the numbers of a spec and a schedule: tiles, instructions, bytes; which are refused
  kernel.py          one producer warpgroup, consumers with 64 queries each; the epilogue of a consumer
  load.py            the producer: queries, and blocks of keys and values
  main_loop.py       a consumer: 64 queries against block after block of keys
  fp8.py             e4m3 operands: scales, weights, transposed values
  tile_scheduler.py  which work tiles a CTA has: `block_m` queries of one head each
"""
