"""Attention of few new queries over a cache: in a graph, and over pages by name.

  match.py        few queries and many keys in a graph: split-KV decode attention
  paged.py        paged attention, a named function; paged_reference.py is plain tinygrad, paged_lower.py
                  the kernels
  paged_check.py  NV_DEBUG=1: checks block tables and lengths before kernels read them
"""
