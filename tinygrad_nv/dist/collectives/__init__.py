"""Collectives as functions of Tensors.

  kernel.py     one call in the graph: a kernel that calls the group's transport
  functions.py  all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, send, recv, with gradients
"""
