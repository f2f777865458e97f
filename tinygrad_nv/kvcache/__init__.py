"""The paged KV cache: page allocation, block tables, prefix caching, eviction, offload.

Read in this order:
  page_allocator.py  pages of one memory: free, cached, in use; reference counts, LRU eviction
  prefix_hashes.py   hashes of full pages, the keys of the prefix cache
  pool.py            the pages of a device and its host, and the copies that a batch must do
  block_table.py     the pages of a sequence: reserve, advance, fork, prune, truncate, offload, release
  offload.py         offload to host pages, and back
  shape.py           what a cache holds of a token in one layer
  store.py           the tensors of pages on the device and the host, and copies between them
  cache.py           `KVCache["B", "H", "S_max", "D", dtype]`: a paged cache for a user's own model loop;
                     kind.py, its type
"""
