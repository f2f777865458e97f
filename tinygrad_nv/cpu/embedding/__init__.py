"""Rows of a table by index, on a CPU.

  kernel.py  lookup, and the sums of its gradient
"""
