"""Decode attention on a CPU.

  kernel.py  over pages or a contiguous cache: keys and values are read once, in splits
  split.py   one split of a sequence's keys: scores, softmax, weighted values
"""
