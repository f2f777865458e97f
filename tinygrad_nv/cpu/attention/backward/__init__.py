"""The gradient of attention on a CPU.

  kernel.py  The backward pass of flash attention on a CPU (FlashAttention-2, Dao 2023, algorithm 2)
  text.py    The C of kernel.py: a block of keys against a block of rows, and the loops around it
  tiles.py   What kernel.py computes with: products of tiles in registers, and rows in scratch memory, in C
"""
