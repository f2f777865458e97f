"""Grouped matmuls with quantised matrices by mma.sync: sm_80 and later, any rows of a group.

  plan.py    the matmul of all tiles, legality, tiles to try first, cost
  kernel.py  the template
"""
