"""Matmuls with wgmma and TMA, warp-specialised and persistent: sm_90a.

  plan.py            the numbers of a spec and a schedule: tiles, instructions, counts
  template.py        which schedules there can be, those to try first, and their cost
  kernel.py          one producer warpgroup, the others multiply
  tile_scheduler.py  persistent CTAs, work tiles in grouped order
  load.py            the producer: tensor maps, and the boxes of one stage
  main_loop.py       the consumers: wgmmas stage after stage
  store.py           the epilogue of a consumer, by tile/result_store.py; split-K and stream-K: the sums of
                     one tile from several CTAs, in a fixed order
"""
