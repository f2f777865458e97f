"""Matmuls with a quantised matrix by mma.sync: sm_80 and later, any rows of activations.

  plan.py       the numbers of a spec and a schedule
  template.py   which schedules there can be, and those to try first
  kernel.py     the template
"""
