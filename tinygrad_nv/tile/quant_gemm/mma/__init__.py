"""Matmuls with a quantised matrix by mma.sync: sm_80 and later, any rows of activations.

  plan.py       the numbers of a spec and a schedule
  legality.py   what the template requires of a schedule
  defaults.py   tiles to try first
  copy.py       codes and factors to shared memory, and to fragments of operand B
  kernel.py     the template
"""
