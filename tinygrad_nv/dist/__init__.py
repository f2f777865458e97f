"""Ranks, and what they say to each other.

  ranks.py, store.py    who this process is, and how ranks meet group.py              groups of ranks,
  `init()` and `world()` collectives/          functions of Tensors: all_reduce, reduce_scatter, all_gather,
  all_to_all, broadcast, send, recv transports/, csrc/    what carries the bytes: shared memory, MPI

Nothing here is imported by a program of one device.
"""
