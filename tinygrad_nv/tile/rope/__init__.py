"""Rotary positions of whole sequences, from q|k|v to heads and back.

  spec.py       where q|k|v, heads and angles lie
  templates.py  the record
  kernel.py     the template: sm_80 and later
"""
