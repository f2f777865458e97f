"""Sums of outer products of the rows of groups with wgmma, TMA and cp.async: sm_90a.

  plan.py            the matmul of a group, legality, schedules to try first, cost
  tile_scheduler.py  the rows of a tile's group, read one tile ahead
  load.py            TMA of whole stages, cp.async of gathered rows and of the first stage
  kernel.py          gemm/wgmma's kernel with these
"""
