"""Matmuls with a quantised matrix.

  named.py      `quant_matmul`, a named function, its reference and its gradient
"""
