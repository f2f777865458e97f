"""Keys and values in pages: which request has which, who shares them, what is kept and what goes.

Read in this order:
  pool.py     pages: free, cached, in use; reference counts, eviction
  prefix.py   hashes of full pages, by which equal prefixes share them
  table.py    a sequence's pages: reserve, advance, fork, prune, truncate, offload, release
  offload.py  pages of the host
  cache.py    `KVCache["B", "H", "S_max", "D", dtype]`: pages on a device, with their operations
"""
