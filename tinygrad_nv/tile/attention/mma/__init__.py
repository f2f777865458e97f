"""Attention with mma.sync (FlashAttention-2): sm_80 and later.

  copy.py      How a CTA brings rows of q, keys or values to shared memory
  kernel.py    Flash attention with mma.sync: keys and values in a ring of cp.async stages, sums and …
  legality.py  What `flash_mma` asks of a schedule, and how much a schedule takes
"""
