"""Rows times the matrices of their groups with wgmma, TMA and cp.async: sm_90a.

  plan.py            the numbers of a spec and a schedule, legality, schedules to try first, cost
  kernel.py          gemm/wgmma's kernel with the parts below, and operands with scales of groups of K
  tile_scheduler.py  tiles of groups, whose extents are read on the device
  load.py            the producer: boxes of matrices and rows, or rows gathered by other warps
  store.py           the epilogue: activation, weights, rows to their places
"""
