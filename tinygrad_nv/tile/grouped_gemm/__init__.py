"""Matmuls of rows with a matrix for each group of them: mixtures of experts.

  spec.py        what is computed
  outer.py       sums of outer products of the rows of groups: gradients of the matrices
  reference.py   the same in plain tinygrad
  schedules.py   the schedules of a GPU's templates
  cost.py        how long they take
  work.py        which rows a CTA of a plain grid has
  epilogue.py    bias, activation (act(gate) · up), weight, places
  gemv/          the template of few rows a group
  wgmma/         the template with wgmma: sm_90a
  mma/           the template with mma.sync
  outer_wgmma/   the template of sums of outer products with wgmma: sm_90a
  outer_mma/     the same with mma.sync
  templates.py   the records of the templates
"""
