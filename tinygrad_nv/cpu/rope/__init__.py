"""Rotary positions of whole sequences, on a CPU.

  kernel.py  from q|k|v to heads, and back (tile/rope/spec.py)
"""
