"""Convolutions as implicit GEMMs.

  spec.py       where images, filters and the result lie; the matmul that it is
  reference.py  the same in plain tinygrad
  schedules.py, templates.py  the schedules of the templates, and their record
  wgmma.py      a template: sm_90a, wgmma, images by im2col tensor maps
  mma.py        another: sm_80 and later, mma.sync
"""
