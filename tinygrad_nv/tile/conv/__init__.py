"""Convolutions as implicit GEMMs.

  spec.py       where images, filters and the result lie; the matmul that it is
  reference.py  the same in plain tinygrad
  schedules.py, templates.py  the schedule of the template, and its record
  mma.py        the template: sm_80 and later, mma.sync
"""
