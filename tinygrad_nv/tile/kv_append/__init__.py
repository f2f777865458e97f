"""New keys and values into pages.

  kernel.py  New keys and values into pages, with rotation and rounding, in one launch. For sm_80 and later
  spec.py    What an append computes: new keys and values of each request, rotated and rounded, into its pages
"""
