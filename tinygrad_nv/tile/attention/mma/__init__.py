"""Attention with mma.sync (FlashAttention-2): sm_80 and later.

  kernel.py    the template: keys and values in cp.async stages, sums and weights in registers
  copy.py      copies of queries, keys and values to shared memory
  legality.py  what the template requires of a schedule, and its resources
"""
