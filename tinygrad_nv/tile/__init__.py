"""Tiles: what is computed, how, and the kernels that do it.

Read in this order:
  spec.py       `GemmSpec`: a matrix product and its epilogue, by extents, strides and dtypes
  schedule.py   `Schedule`: tiles, warps and stages, and what makes one impossible
  layout.py     where elements lie in shared memory
  ops.py        what a CTA does with tiles: copy, load fragments, multiply, finish, store
  templates/    one kernel family a file, written in these

Nothing here knows of tinygrad's graphs. A template's kernel runs on the emulator as it runs on a GPU.
"""
