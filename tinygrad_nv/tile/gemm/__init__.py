"""Matmuls: spec, schedules, legality, cost, and the templates mma, wgmma and gemv.

  spec.py        what is computed: a matmul and its epilogue, in types; dense.py: specs from a few words
  schedules.py   the schedules of the templates: tiles, warps, stages
  templates.py   the records of the templates, and why none takes a matmul
  legality.py    what all templates ask of a schedule
  analytic.py    schedules worth trying; the one that the cost model likes best; determinism's (tile/order.py)
  cost.py        the cost model: waves, tensor-core cycles, bytes by memory level
  work.py        the cycles of one CTA on each resource of its SM
  tune.py        what is worth trying, and the counters of one of them on the emulator
  splits.py      split-K: the part of K of each CTA, and the order of sums
  mma/           mma.sync: sm_80 and later, any strides
  wgmma/         wgmma and TMA, warp-specialised and persistent: sm_90a
  gemv/          few rows, at memory bandwidth
"""
