"""What carries bytes between ranks, on memory of the host.

  library.py   the C of csrc/, compiled once, and its structures
  shared.py    ranks of one machine: memory that they share
  mpi.py       ranks of MPI

A transport fills in a group's structure; what runs then is C (csrc/group.h), called by kernels of the graph.
"""
