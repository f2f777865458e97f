"""Convolutions on a CPU.

  kernel.py     the blocked GEMM (cpu/gemm/blocked), whose left operand is packed from images
  templates.py  the record
"""
