"""Decode attention over latents (MLA) by wgmma, sm_90a: a tile in shared memory is keys and values.

  plan.py       the numbers of a spec and a schedule: tiles, bytes; what the template requires of both
  kernel.py     the template: one warpgroup loads, two multiply, and store the result or a split of it
  load.py       queries and latents to shared memory, by cp.async
  main_loop.py  the two that multiply: one has scores and softmax, each half of the columns of values
  tile_scheduler.py  which splits of which requests a CTA has
"""
