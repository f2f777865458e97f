"""Matmuls with wgmma and TMA, warp-specialised and persistent: sm_90a.

  cost.py            What `gemm_wgmma` takes
  defaults.py        wgmma's tiles worth trying first: 128×256 and 256×128 with two consumers, and 128×128 …
  kernel.py          Matrix products with wgmma and TMA: one warpgroup loads, the others multiply. For sm_90a
  legality.py        What `wgmma` kernels ask of a schedule
  load.py            The producer's copies: tensor maps, and the boxes of one stage
  main_loop.py       The consumers' main loop: wgmmas of a warpgroup's rows of A with all of B, stage after …
  plan.py            What follows from a spec and a schedule of `gemm_wgmma`: tiles, instructions, counts. …
  reduction.py       Sums of one tile from several CTAs: how they meet, always in the same order
  store.py           What consumers do with the sums of a tile: hand them to store.py as cells of 16 × 8
  tile_scheduler.py  Which tiles a CTA makes, and where they lie: persistent CTAs, tiles in grouped order
"""
