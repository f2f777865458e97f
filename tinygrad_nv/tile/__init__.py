"""Tiles: what is computed, how, and the kernels that do it.

Read in this order:
  spec.py        `GemmSpec`: a matrix product, by extents, strides and dtypes
  expression.py  what happens to a sum before it is stored
  schedule.py    `Schedule`: template, tiles, warps and stages
  legality.py    what makes one impossible (legal_*.py: for each template; limits.py: what GPUs have room for)
  kernel.py      `GemmKernel`: PTX and how it is launched
  layout.py      where elements lie in shared memory
  ops.py         how a CTA copies tiles to shared memory (fragments.py: how a warp reads them for mma.sync)
  pipeline.py    a ring of stages between a thread that starts copies of TMA and the warps that read
  walk.py        which tile a CTA makes; splits.py: how the sums of several CTAs of a tile meet
  epilogue.py    expressions in instructions (lanes.py: values of one or two elements; access.py: in memory)
  dropout.py     which weights of an attention are dropped: a counter-based generator
  store.py       from sums to the result in memory, as store_plan.py has it (share.py: what a warp has of it;
                 staging.py: by way of shared memory)
  templates/     one kernel family a file, written in these
  choose.py      which schedule a product gets: machine.py has GPUs' figures, work.py what a CTA does, cost.py
                 how long it takes, defaults.py where to begin, space.py what else there is, analytic.py
                 the best of these
  tune.py        the best by trying (trial.py, clock.py), kept in database.py as spec_json.py writes it
  dense.py       products by a few words, for commands, benchmarks and tests

Nothing here knows of tinygrad's graphs. A template's kernel runs on the emulator as it runs on a GPU.
"""
