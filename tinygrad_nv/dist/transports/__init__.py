"""What carries bytes between ranks.

  library.py        the C of csrc/, compiled once, and its structures
  shared.py         ranks of one machine: memory that they share
  mpi.py            ranks of MPI
  nccl_api.py       NCCL's functions by ctypes
  nccl.py           communicators of NCCL, between GPUs
  nccl_emulated.py  what stands for NCCL on emulated devices
  local.py          reductions over GPUs of one process

On memory of the host a transport fills in a group's structure; what runs then is C (csrc/group.h), called by
kernels of the graph.
"""
