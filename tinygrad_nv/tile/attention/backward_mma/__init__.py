"""The gradient of attention with mma.sync (FlashAttention-2).

  dq.py        dq of a block of rows: products of ds and the CTA's keys, added to what other CTAs have added
  kernel.py    The backward pass of flash attention with mma.sync: a CTA has a block of keys, and dk and dv …
  legality.py  What `flash_backward_mma` asks of a schedule, and how much a schedule takes
  ordered.py   Blocks of dq in turns: the same sum whatever CTAs do first
  rows.py      The blocks of rows that see a block of keys, and how they come to shared memory
"""
