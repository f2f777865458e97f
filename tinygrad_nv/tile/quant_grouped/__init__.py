"""Matmuls of rows with the quantised matrix of their group.

  spec.py       what is computed
  reference.py  the same in plain tinygrad
"""
