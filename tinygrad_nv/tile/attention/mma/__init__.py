"""Attention with mma.sync (FlashAttention-2): sm_80 and later.

  plan.py      the numbers of a spec and a schedule, and which are refused
  kernel.py    the template: keys and values in cp.async stages, sums and weights in registers
  copy.py      copies of queries, keys and values to shared memory
"""
