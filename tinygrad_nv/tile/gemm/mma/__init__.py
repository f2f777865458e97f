"""Matmuls with mma.sync: sm_80 and later, any strides.

  plan.py      the numbers of a spec and a schedule: tiles, counts, the store
  kernel.py    the template: cp.async stages, fragments by ldmatrix
  template.py  which schedules there can be, those to try first, and their cost
"""
