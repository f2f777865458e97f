"""New keys and values into pages, as a function known by name.

  lower.py      An append of keys and values to a kernel of ours, that writes the pages in place
  named.py      New keys and values into pages, as a function known by name
  reference.py  New keys and values into pages, in plain tinygrad: as tile/kv_append/spec.py defines it, on …
"""
