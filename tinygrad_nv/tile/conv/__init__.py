"""Convolutions as implicit GEMMs.

  spec.py       where images, filters and the result lie; the matmul that it is
  reference.py  the same in plain tinygrad
  templates.py  the schedules of the templates, what is legal and tried first, their records
  wgmma.py      a template: sm_90a, wgmma, images by im2col tensor maps
  mma.py        another: sm_80 and later, mma.sync
"""
