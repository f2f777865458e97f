"""Matmuls: spec, schedules, legality, cost, and the templates mma, wgmma and gemv.

  analytic.py    Which schedule the cost model likes best
  candidates.py  The schedules there are for a product: all that legality accepts, of what is worth writing …
  choose.py      Which schedule a product gets, or why none
  cost.py        How long a schedule takes: an analytic model of waves, tensor-core cycles and bytes by level
  dense.py       Products of dense matrices, by a few words: what `tinygrad-nv tune`, benchmarks and tests …
  legality.py    What schedule can be, for a spec and an architecture, and why not
  schedules.py   How a matmul is computed: the schedules of its templates
  spec.py        What is computed, in types: a matrix product and what follows it. A spec does not know its …
  splits.py      One tile's sum by several CTAs: which tiles along K each has, and how their sums meet
  templates.py   The templates of a matmul: gemv/ (few rows), wgmma/ (sm_90a), mma/ (sm_80 and later, any …
  trial.py       A kernel on the emulator, to see what it costs
  tune.py        The best of some schedules, by trying them
  work.py        What one CTA has to do: cycles of each of its SM's resources
  gemv/          Matmuls of few rows, at the speed of memory
  mma/           Matmuls with mma.sync: sm_80 and later, any strides
  wgmma/         Matmuls with wgmma and TMA, warp-specialised and persistent: sm_90a
"""
