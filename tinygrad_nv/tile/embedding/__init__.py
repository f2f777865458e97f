"""Rows of a table by index.

  spec.py       lookup, and its gradient
  reference.py  both in plain tinygrad
  templates.py  the schedules, the records, what follows from a gradient's spec
  kernel.py     which row a token means; the lookup: sm_80 and later
  gradient.py   the gradient: sm_80 and later; sorting.py is its first kernel
"""
