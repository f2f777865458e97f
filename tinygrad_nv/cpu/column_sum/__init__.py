"""Sums of columns, on a CPU.

  kernel.py  gradients of the weights of norms, and of biases (tile/column_sum/spec.py)
"""
