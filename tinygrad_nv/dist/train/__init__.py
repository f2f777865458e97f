"""Training over ranks: the parts of a step of many ranks. Each primitive gives the result of one device.

  data_parallel.py      averages gradients, in buckets; ZeRO-1 and ZeRO-2: each rank updates its part of the
                        parameters
  fully_sharded.py      ZeRO-3 (FSDP): a layer's parameters are whole only while the layer is computed
  sequence.py           sequence parallel layers: each rank has norms and residuals of its own tokens
  cross_entropy.py      the loss of an output layer whose vocabulary is cut
  ring_attention.py     attention over a sequence of which each rank has a part
  experts.py            experts on several ranks: sends tokens to their experts, and results back
  schedules.py          pipeline schedules as data: GPipe, 1F1B, interleaved, zero-bubble
  check.py, pipeline.py runs a schedule on paper: its time, and what it keeps; runs one on ranks
  graph.py              values whose gradient is a function of its own
"""
