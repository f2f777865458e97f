"""Matmuls with a quantised matrix.

  match.py      matrices that a graph dequantises: Cast(codes) · scale
  named.py      `quant_matmul`, a named function, its reference and its gradient
"""
