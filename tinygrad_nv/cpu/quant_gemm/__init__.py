"""Matmuls with a quantised matrix on a CPU.

  decode.py     elements of any type in float32, in C
  gemv.py       few rows: the matrix is read once
  blocked.py    many rows: blocks of the matrix are dequantised into panels of the blocked GEMM
  tiles.py      codes and scales of a matrix in tiles, in C
  columns.py    columns of a matrix in tiles as float32 numbers, in C
  pairs.py      2 and 4 bits of a matrix in tiles as pairs of bfloat16, in C
  rows.py       rows of activations in bytes or float32, in C
  byte_dots.py  dot products of bytes, in C
  dots.py       any number of rows times a matrix in tiles, in bytes, float32 or pairs of bfloat16
  byte_panels.py  many rows in bytes, with codes of a tile that are unpacked once for all of them
  panels.py     many rows of floats times a matrix in tiles, dequantised once for a block of rows
  amx.py        many rows in bytes times a matrix in tiles, by AMX tiles
  codes.py      any number of rows of codes times codes of a matrix in tiles, in integers
  codes_amx.py  many rows of codes, by AMX tiles
  templates.py  the templates in their order
"""
