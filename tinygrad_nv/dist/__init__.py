"""Ranks: processes that compute together, and what they say to each other.

  ranks.py, rendezvous.py, store.py   who this process is, how ranks meet, values that they share
  launcher.py, processes.py, cores.py starts ranks of this host, and ends them together
  watchdog.py                         ends all ranks when one is lost, hangs, or differs
  group.py                            groups of ranks; `init()` and `world()`
  collectives/                        functions of Tensors: all_reduce, reduce_scatter, all_gather, …
  transports/, csrc/                  what carries the bytes: shared memory, MPI

Nothing here is imported by a program of one device.
"""
