"""Rows of a table by index.

  spec.py       lookup, and its gradient
  reference.py  both in plain tinygrad
  program.py    both, as programs of the tile language: a gradient for GPUs, and one for CPUs
"""
