"""Rows of a table by index.

  spec.py       lookup, and its gradient
  reference.py  both in plain tinygrad
  kernel.py     the lookup: sm_80 and later
"""
