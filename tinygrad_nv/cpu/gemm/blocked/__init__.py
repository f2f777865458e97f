"""The blocked GEMM of packed operands.

  blocks.py  Block sizes of the blocked GEMM, from the machine's caches and registers
  kernel.py  Products of many rows: a blocked GEMM of packed operands
  micro.py   The innermost loop of the blocked GEMM: a block of the result in registers
  pack.py    Packing of an operand of the blocked GEMM: from any strides to what the innermost loop reads
"""
