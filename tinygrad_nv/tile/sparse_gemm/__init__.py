"""Matmuls with a 2:4 sparse matrix on tensor cores, which skip what is not stored.

  spec.py        a matmul, and the sparse operand's buffers
  reference.py   it in plain tinygrad
  schedules.py   the schedules of its templates
  wgmma/         wgmma.sp: sm_90a
  mma/           mma.sp: sm_80 and later
  templates.py   the records of the templates
"""
