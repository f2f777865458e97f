"""Rows: norms, softmax, argmax.

  kernel.py  Rows: norms, softmax, argmax, and elements made without statistics (spec.py). For sm_80 and later
  plan.py    How rows are shared out among threads: of kernel.py, and of elements without statistics
  spec.py    What is computed row by row: statistics of a row, and elements made with them. A spec does not …
"""
