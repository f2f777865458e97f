"""Grouped matmuls with quantised matrices of few rows a group: sm_80 and later.

  plan.py    the matmul of a tile, legality, schedules to try first, cost
  kernel.py  the template
"""
