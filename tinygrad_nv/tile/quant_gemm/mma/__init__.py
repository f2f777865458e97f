"""Matmuls with a quantised matrix by mma.sync: sm_80 and later, any rows of activations.

  plan.py       the numbers of a spec and a schedule, which schedules there can be, those to try first
  kernel.py     the template
"""
