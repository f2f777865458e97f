"""Rows of a table by index.

  spec.py    lookup, and its gradient
  kernel.py  the lookup: sm_80 and later
"""
