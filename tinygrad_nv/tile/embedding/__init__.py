"""Rows of a table by index.

  spec.py       lookup, and its gradient
  reference.py  both in plain tinygrad
  program.py    the lookup, and a CPU's gradient, as programs of the tile language
  templates.py  a GPU's gradient: its schedule and record, and what follows from its spec
  gradient.py   its kernels: sm_80 and later; sorting.py is its first kernel, kernel.py finds rows of tokens
"""
