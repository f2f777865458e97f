"""Matmuls of rows with a matrix for each group of them: mixtures of experts.

  spec.py       what is computed
  outer.py      sums of outer products of the rows of groups: gradients of the matrices
  reference.py  the same in plain tinygrad
"""
