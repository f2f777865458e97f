"""Norms, softmax, argmax.

  spec.py    statistics of a row, and elements computed with them
  plan.py    how threads share rows
  kernel.py  the template: sm_80 and later
"""
