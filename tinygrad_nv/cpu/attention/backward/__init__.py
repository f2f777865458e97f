"""The gradient of attention on a CPU (FlashAttention-2, Dao 2023, algorithm 2).

  kernel.py  the template: legality, schedule, build
  text.py    the C: a block of keys against a block of queries, and the loops around it
  tiles.py   matmuls of tiles in registers, and rows in scratch memory, in C
"""
