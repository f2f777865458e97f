"""Grouped matmuls of few rows a group, at memory bandwidth, by the loop of gemm/gemv.

  plan.py      the matmul of one tile, legality, schedules to try first, cost
  kernel.py    the template
"""
