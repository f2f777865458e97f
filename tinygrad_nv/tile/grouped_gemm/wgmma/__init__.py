"""Rows times the matrices of their groups with wgmma, TMA and cp.async: sm_90a.

  plan.py            the numbers of a spec and a schedule
  legality.py        what the template requires of a schedule
  defaults.py        tiles to try first
  kernel.py          gemm/wgmma's kernel with the parts below
  tile_scheduler.py  tiles of groups, whose extents are read on the device
  load.py            the producer: boxes of matrices and rows, or rows gathered by other warps
  scales.py          operands of 8 bits with scales of groups of K
  store.py           the epilogue: activation, weights, rows to their places
"""
