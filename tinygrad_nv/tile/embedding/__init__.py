"""Rows of a table by index.

  spec.py       lookup, and its gradient
  reference.py  both in plain tinygrad
  program.py    the lookup, a program of the tile language
  templates.py  the gradient's schedule and record, and what follows from its spec
  gradient.py   the gradient: sm_80 and later; sorting.py is its first kernel, kernel.py finds rows of tokens
"""
