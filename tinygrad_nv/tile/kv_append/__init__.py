"""New keys and values into pages.

  spec.py       rotary embedding, rounding and scatter of new keys and values
  reference.py  the same in plain tinygrad
  program.py    the kernel, a program of the tile language
"""
