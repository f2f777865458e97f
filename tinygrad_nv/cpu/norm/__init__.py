"""Rows on a CPU: norms, softmax, argmax.

  kernel.py  Rows: norms, softmax, argmax, and what is computed with them (tile/norm/spec.py)
"""
