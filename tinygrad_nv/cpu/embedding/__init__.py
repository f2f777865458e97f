"""Rows of a table by number, on a CPU.

  kernel.py  Rows of a table (tile/embedding/spec.py): copied, and for its gradient added up
"""
