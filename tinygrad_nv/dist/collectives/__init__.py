"""Collectives as functions of Tensors.

  functions.py    all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, send, recv, shift, with
                  gradients; in the graph of a CPU a kernel that calls the group's transport
  device.py       a collective in the graph of a GPU: a call of NCCL
  peer_memory.py  all-reduce of small messages by kernels over peer memory, in place of NCCL: one process
  peer_ranks.py   the same between ranks that are processes
  peer_norm.py    that with residual and RMSNorm behind it
  sharded.py      reductions over devices of one process, in place of tinygrad's ALLREDUCE
  sharding.py     tensors over a mesh of devices of one process
"""
