"""Matmuls of few rows on a CPU: GEMV and skinny GEMM.

  kernel.py     the template: the weights are read once
  main_loop.py  the sums of one chunk of columns, by the layout of b
  pairs.py      the same of 9 rows and more, by dot products of bfloat16
"""
