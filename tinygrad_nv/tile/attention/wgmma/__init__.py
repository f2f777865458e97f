"""Attention with wgmma and TMA (FlashAttention-3): sm_90a.

  blocks.py          Which blocks of columns a CTA's rows see, and which of them need no mask
  fp8.py             What flash_wgmma does of its own with operands of 8 bits (e4m3), as FlashAttention-3 …
  kernel.py          Attention with wgmma and TMA (FlashAttention-3, Shah et al. 2024): one warpgroup …
  legality.py        What `flash_wgmma` kernels ask of a schedule
  load.py            The producer's copies: queries, and blocks of keys and values by turns
  main_loop.py       A consumer warpgroup: 64 rows against block after block of columns
  plan.py            What follows from a spec and a schedule of `flash_wgmma`: tiles, instructions, bytes. …
  store.py           The end of a consumer: the result, and l
  tile_scheduler.py  Which tiles a CTA makes: `block_m` rows of one head each
"""
