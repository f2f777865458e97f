"""Matmuls of rows with a matrix for each group of them, as a named function: mixtures of experts.

  named.py  `grouped_matmul`
"""
