"""Training over ranks: what a step of many ranks is made of. Each primitive gives the result of one device.

  graph.py              gradients of one's own, and which collectives a graph has
  data_parallel.py      gradients, averaged in buckets
  zero.py               ZeRO-1 and ZeRO-2: each rank updates its part of the parameters
  fully_sharded.py      ZeRO-3 (FSDP): parameters that are whole only around their layer
  sequence.py           sequence parallel layers: norms on this rank's tokens
  ring_attention.py     attention over a sequence that ranks have in parts
  experts.py            experts on several ranks: tokens there and back
  schedules.py, check.py, pipeline.py   pipeline schedules as data, what they cost, and what runs them
"""
