"""Matmuls of operands in 8 bits with scales, W8A8 and FP8.

  named.py      `scaled_matmul`, a named function, and its reference
  fp8.py        `fp8_linear`, whose matmuls forward and backward are in FP8
  quantize.py   `quantize`, which makes codes, and its kernels
  epilogue.py   codes in the epilogue of the matmul before them
"""
