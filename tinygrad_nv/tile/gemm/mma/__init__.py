"""Matmuls with mma.sync: sm_80 and later, any strides.

  plan.py      the numbers of a spec and a schedule: tiles, counts, the store
  kernel.py    the template: cp.async stages, fragments by ldmatrix
  legality.py  what the template requires of a schedule
  defaults.py  tiles to try first
  cost.py      what the cost model asks
"""
