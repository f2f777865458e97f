"""Attention of few new rows over a cache: in a graph, and over pages by name.

  match.py            Attentions of few rows and many keys: decode attentions, which divide the keys
  paged.py            Attention over keys and values in pages, as a function known by name
  paged_check.py      NV_DEBUG=1: block tables and lengths are looked at before kernels follow them
  paged_lower.py      Paged attention to kernels of ours: from a named function's arguments to a decode …
  paged_reference.py  Attention over keys and values in pages, in plain tinygrad: as paged.py defines it, …
"""
