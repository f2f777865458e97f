"""New keys and values into pages, as a named function.

  named.py      the function; its body is tile/kv_append/reference.py
  lower.py      the kernel, which writes the pages in place
"""
