"""Matmuls of rows with the quantised matrix of their group.

  named.py   `quant_grouped_matmul`, and its kernel
"""
