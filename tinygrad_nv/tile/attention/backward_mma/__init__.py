"""The gradient of attention with mma.sync (FlashAttention-2).

  kernel.py    a CTA has a block of keys, and its dk and dv in registers
  legality.py  what the template requires of a schedule, and its resources
  rows.py      the blocks of queries that see a block of keys, and their copies to shared memory
  dq.py        dq of a block of queries, added to what other CTAs have added
  ordered.py   the deterministic order of these additions
"""
