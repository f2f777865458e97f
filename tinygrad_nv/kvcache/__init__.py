"""The paged KV cache: block tables, prefix caching, eviction, host offload.

Read in this order:

  pages.py    pages of one memory: free, cached, in use; reference counts, eviction
  prefix.py   hashes of full pages, by which equal prefixes share them
  pool.py     the pages of a device and of the host, and the copies that a batch must make
  table.py    a sequence's block table: reserve, advance, fork, prune, truncate, offload, release
  offload.py  pages of the host
  store.py    the tensors of all pages, and copies between device and host
  cache.py    `KVCache["B", "H", "S_max", "D", dtype]`: pages on a device, with their operations; kind.py
              reads the type between the brackets
"""
