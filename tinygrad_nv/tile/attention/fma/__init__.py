"""Attention in float32, without tensor cores.

  kernel.py    the template: keys and values in a pipeline of stages
  legality.py  what the template requires of a schedule, and its resources
  matmuls.py   the two matmuls: each lane multiplies a small matrix in registers
  softmax.py   the online softmax, without the rounding of 16-bit weights
  store.py     the sum of warps with the same queries, and the store
"""
