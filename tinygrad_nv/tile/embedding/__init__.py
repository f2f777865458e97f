"""Rows of a table by number.

  kernel.py  Rows of a table by number (spec.py), copied. For sm_80 and later
  spec.py    Rows of a table by number, and the table's gradient. A spec does not know its target
"""
