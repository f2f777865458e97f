"""Matmuls of rows with the quantised matrix of their group.

  spec.py       what is computed
  reference.py  the same in plain tinygrad
  schedules.py  the schedules of a GPU's templates
  matrices.py   where the matrices of a group lie
  gemv/, wgmma/, mma/  the templates
  templates.py  their records, and how long they take
"""
