"""Sums of outer products of the rows of groups with wgmma, TMA and cp.async: sm_90a.

  plan.py            the matmul of a group, legality, schedules to try first, cost
  load.py            which rows a tile's group has; TMA of whole stages, cp.async of gathered rows and of
                     the first stage
  kernel.py          gemm/wgmma's kernel with these
"""
