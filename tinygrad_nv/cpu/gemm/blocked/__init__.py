"""Blocked GEMM of packed operands.

  blocks.py  block sizes, from caches and registers
  pack.py    packing an operand of any strides for the micro-kernel
  micro.py   the micro-kernel: a block of the result in registers
  kernel.py  the template, and the loops around the micro-kernel
"""
