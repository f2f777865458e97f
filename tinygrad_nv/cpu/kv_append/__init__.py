"""New keys and values into pages, on a CPU.

  kernel.py  New keys and values into pages or a contiguous cache, with rotation and rounding, in one launch
"""
