"""Matmuls of rows with a matrix for each group of them: mixtures of experts.

  named.py     `grouped_matmul`, as a named function
  scaled.py    `scaled_grouped_matmul`: the same of codes of 8 bits with scales
  slots.py     what both take beside rows and matrices
  outer.py     `grouped_outer`: sums of outer products of the rows of each group
  gradient.py  the gradients of the first, made of both
  dispatch.py  `dispatch`: a router and its experts in one call
  match.py     the same matmuls as tinygrad's gathers of experts, found in graphs
"""
