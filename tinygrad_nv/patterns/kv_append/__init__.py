"""New keys and values into pages, as a named function.

  named.py      the function
  reference.py  plain tinygrad, as tile/kv_append/spec.py defines it
  lower.py      the kernel, which writes the pages in place
"""
