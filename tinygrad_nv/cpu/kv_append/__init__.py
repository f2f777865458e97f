"""New keys and values into pages, on a CPU.

  kernel.py  rotary embedding, rounding and scatter in one launch, into pages or a contiguous cache
"""
