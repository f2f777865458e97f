"""Matmuls with mma.sync: sm_80 and later, any strides.

  kernel.py    the template: cp.async stages, fragments by ldmatrix
  legality.py  what the template requires of a schedule
"""
