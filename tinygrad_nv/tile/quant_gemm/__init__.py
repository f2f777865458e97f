"""Matmuls with a quantised matrix.

  spec.py       a matmul, and what its right operand is stored as
  reference.py  it in plain tinygrad
"""
