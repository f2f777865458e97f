"""Rows of a table by index.

  spec.py       lookup, and its gradient
  reference.py  both in plain tinygrad
  templates.py  the schedules and the records
  kernel.py     the lookup: sm_80 and later
  plan.py       what follows from a gradient's spec
  gradient.py   the gradient: sm_80 and later; sorting.py is its first kernel
  rows.py       which row a token means
"""
