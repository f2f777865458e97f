"""Selective scans over sequences whose states lie in pages: Mamba-1.

  spec.py       what is computed, and where operands lie
  program.py    the program, for every target
  reference.py  the same in plain tinygrad
"""
