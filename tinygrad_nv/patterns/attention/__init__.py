"""Attention in a graph and as named functions: dense, ragged, fp8, forward and backward.

In a graph:

  attempt.py  where an attention may end, and its call
  match.py    softmax(score(q kᵀ)) v, however it is written, to one kernel
  weights.py  finds the softmax, and the matmuls before and after it
  fitted.py   positions, found once for each node
  score.py    what happens to a score before its exponential, as an expression in float32
  mask.py     what a score hides: a band, and the rest as conditions
  dims.py     batch, heads, queries, keys and head dimension, from the indices of the operands
  spec.py     the spec, and the arguments of the launch

By name:

  named.py           attention, whose gradient is a named function too
  operands.py        q, k, v as [B, H, S, D], from the arguments of a torch or tinygrad user
  reading.py         a named attention's spec, from its arguments
  lower.py           the forward kernel, which stores the LSE for backward
  lower_backward.py  the backward kernel
  varlen.py          ragged batches; varlen_reference.py is plain tinygrad, varlen_lower.py the kernel
  fp8.py             q, k and v of e4m3 with scales
"""
