"""Rotary positions of whole sequences, from q|k|v to heads and back.

  spec.py       where q|k|v, heads and angles lie
  program.py    the programs, for every target
  reference.py  the same in plain tinygrad
"""
