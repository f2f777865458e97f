"""Sums of columns: gradients of the weights of norms, and of biases.

  spec.py       what is added up
  templates.py  the schedule and the record
  kernel.py     the template: sm_80 and later; groups of rows, then their sums
"""
