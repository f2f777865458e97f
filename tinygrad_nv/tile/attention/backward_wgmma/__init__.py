"""The gradient of attention with wgmma and TMA (FlashAttention-3).

  plan.py       the numbers of a spec and a schedule: tiles, registers, bytes; which are refused
  kernel.py     one producer warpgroup, consumers with 64 keys each; the store of dk and dv
  load.py       the producers: keys and values once, blocks of queries and gradients by TMA
  main_loop.py  a consumer: 64 keys against block after block of queries
  weights.py    p and ds in registers, transposed
  halves.py     consumers that share 64 keys, each with half of a block's queries
  dq.py         a warp's share of dq, added to memory
"""
