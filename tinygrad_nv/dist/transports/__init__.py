"""Transports: they carry bytes between ranks.

  library.py        the C of csrc/, compiled once, and its structures
  shared.py         between CPUs of one machine: shared memory
  mpi.py            between CPUs, by MPI
  nccl_api.py       NCCL's functions by ctypes
  nccl.py           between GPUs: communicators of NCCL
  nccl_emulated.py  between emulated GPUs: answers the same functions

A transport between CPUs fills in the structure of a group; the kernels of a graph then call its C function
(csrc/group.h), without Python.
"""
