"""Decode attention: few new rows over a paged or contiguous cache, split along the keys.

  combine.py   How a decode kernel adds up what its warps have, and a request's splits
  copy.py      Pages to shared memory: how warps of a decode kernel bring keys or values by cp.async
  defaults.py  The schedule of a decode attention, from its spec and the architecture alone
  kernel.py    Decode attention over pages or a contiguous cache: split-KV with a combine step, on …
  legality.py  What `decode_attention` asks of a schedule: `block_m` rows of a key head, `block_n` keys at …
  operands.py  Operands of a decode kernel's products: queries, keys and values as fragments of mma.m16n8k16
  plan.py      The numbers of a decode kernel: who reads what, what lies where
  rows.py      Rows of a decode kernel: where they stand, their queries, scores and softmax
  spec.py      What a decode attention computes: a few new rows of each request over its keys and values
  split.py     The first kernel of a decode attention: one split of a request's keys, as kernel.py says
"""
