"""Norms, softmax and argmax on a CPU.

  kernel.py  reductions along rows, and what is computed with them (tile/norm/spec.py)
"""
