"""Keys and values in pages: which request has which, who shares them, what is kept and what goes.

Read in this order:
  pages.py    pages of one memory: free, cached, in use; reference counts, eviction; what is to be copied
  prefix.py   hashes of full pages, by which equal prefixes share them
  pool.py     the pages of a device and of the host beside it, and what a batch must copy
  table.py    a sequence's pages: reserve, advance, fork, prune, truncate, offload, release
  offload.py  pages of a device and of the host, and copies from one to the other
  store.py    the tensors of all pages, and those copies on the device
  cache.py    `KVCache["B", "H", "S_max", "D", dtype]`: pages on a device, with their operations;
              kind.py, what stands between the brackets
"""
