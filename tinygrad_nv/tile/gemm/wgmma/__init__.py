"""Matmuls with wgmma and TMA, warp-specialised and persistent: sm_90a.

  plan.py            the numbers of a spec and a schedule: tiles, instructions, counts
  legality.py        what the template requires of a schedule
  defaults.py        tiles to try first
  cost.py            what the cost model asks
  kernel.py          one producer warpgroup, the others multiply
  tile_scheduler.py  persistent CTAs, work tiles in grouped order
  load.py            the producer: tensor maps, and the boxes of one stage
  main_loop.py       the consumers: wgmmas stage after stage
  reduction.py       split-K and stream-K: the sums of one tile from several CTAs, in a fixed order
  store.py           the epilogue of a consumer, by tile/result_store.py
"""
