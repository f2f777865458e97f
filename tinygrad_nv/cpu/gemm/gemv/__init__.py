"""Matmuls of few rows on a CPU.

  kernel.py     Products of few rows with a matrix that is read once: GEMV, and skinny GEMM
  main_loop.py  The sums of a product of few rows: columns of one chunk, by how b lies
"""
