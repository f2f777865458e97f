"""Matmuls with a quantised matrix on a CPU.

  decode.py     elements of any type in float32, in C
  gemv.py       few rows: the matrix is read once
  blocked.py    many rows: blocks of the matrix are dequantised into panels of the blocked GEMM
  tiles.py      codes and scales of a matrix in tiles, in C
  dots.py       any number of rows times a matrix in tiles, in bytes or float32
  templates.py  the templates in their order
"""
