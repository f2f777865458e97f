"""Sums of outer products of the rows of groups with wgmma, TMA and cp.async: sm_90a.

  plan.py            the matmul of a group, legality, schedules to try first, cost
  kernel.py          gemm/wgmma's kernel with its own copies: cp.async of gathered rows and of first stages
"""
