"""Decode attention on a CPU.

  kernel.py  Decode attention over pages or a contiguous cache: keys and values are read once, in splits
  split.py   A split of keys in a decode attention: scores, softmax, weighted values
"""
