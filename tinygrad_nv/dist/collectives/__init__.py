"""Collectives as functions of Tensors.

  kernel.py     one call in the graph: a kernel that calls the group's transport
  device.py     the same on a GPU: a call of NCCL in a kernel's place
  sharded.py    over devices of one process: what tinygrad makes an ALLREDUCE of
  sharding.py   tensors over a mesh of devices of one process
  functions.py  all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, send, recv, with gradients
"""
