"""Operators of ATen in Tensors: `TABLE`, by overload.

Read in this order:
  table.py         how an operator is registered, dtypes
  elementwise.py   arithmetic, comparisons, activations, constants
  movement.py      views and concatenations
  reductions.py    sums and what is like them
  checks.py        indices out of range
  indexing.py      gathers and scatters
  nn.py            matmuls, norms, embeddings, convolutions, pooling, attention
  cache.py         keys and values into a static cache, in place
"""
from tinygrad_nv.torch.lowering import cache, checks, elementwise, indexing, movement, nn, reductions
from tinygrad_nv.torch.lowering.table import TABLE, Out, Unsupported, dtype_of, torch_dtype

__all__ = ["TABLE", "Out", "Unsupported", "cache", "checks", "dtype_of", "elementwise",
           "indexing", "movement", "nn", "reductions", "torch_dtype"]
