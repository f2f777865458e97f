"""Grouped matmuls with mma.sync, sm_80 and later, by the loop of gemm/mma.

  plan.py      the matmul of all tiles, legality, schedules to try first, cost
  kernel.py    the template: rows gathered by cp.async
"""
