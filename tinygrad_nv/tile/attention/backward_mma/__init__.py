"""The gradient of attention with mma.sync (FlashAttention-2).

  plan.py      the numbers of a spec and a schedule, and which are refused
  kernel.py    a CTA has a block of keys, and its dk and dv in registers
  rows.py      the blocks of queries that see a block of keys, one after the other, and their copies
  dq.py        dq of a block of queries, added to what other CTAs have added
  ordered.py   the deterministic order of these additions
"""
