"""Matmuls of rows with a matrix for each group of them: mixtures of experts.

  spec.py       what is computed
  reference.py  the same in plain tinygrad
"""
