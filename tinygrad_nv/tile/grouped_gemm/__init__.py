"""Matmuls of rows with a matrix for each group of them: mixtures of experts.

  spec.py        what is computed
  reference.py   the same in plain tinygrad
  schedules.py   the schedules of a GPU's templates
  cost.py        how long they take
  activation.py  act(gate) · up in instructions
  wgmma/         the template with wgmma: sm_90a
  templates.py   the records of the templates
"""
