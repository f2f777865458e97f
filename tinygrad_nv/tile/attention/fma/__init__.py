"""Attention in float32, without tensor cores.

  kernel.py    Flash attention in float32, multiplied and added by ordinary arithmetic: keys and values in …
  legality.py  What `flash_fma` asks of a schedule, and how much a schedule takes
  matmuls.py   The two products of flash_fma: every lane multiplies a small matrix of its own, from registers
  softmax.py   The online softmax of float32 attention: as flash_score.py has it, without a rounding that …
  store.py     How warps of flash_fma with the same rows meet, and how the result is stored
"""
