"""Attention in float32, without tensor cores.

  plan.py      the numbers of a spec and a schedule, and which are refused
  kernel.py    the template: keys and values in a pipeline of stages; the sum of warps with the same queries
  matmuls.py   the two matmuls: each lane multiplies a small matrix in registers; the online softmax,
               without the rounding of 16-bit weights
"""
