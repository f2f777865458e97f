"""Quantised matrices: what they are, and how files hold them. Nothing here knows a model: models/quantised/
puts matrices into networks, quantize/ makes quantised checkpoints.

Read in this order:
  types.py      elements, scales and their granularity, packing: `QType`, frozen and hashable
  tensor.py     a matrix of a type in memory: `QTensor`; `dequantize` is every kernel's reference
  stack.py      matrices of a type in one piece, of experts: `QStack`
  sparse.py     2:4 sparse matrices: `SparseTensor`
  fp8.py        tensors of training to 8-bit floats, and what that lost
  readers/      how checkpoints hold them
  gguf/         llama.cpp's files, and how they hold them
  packing.py    codes of few bits in bytes, with NumPy
"""
from tinygrad_nv.quant.sparse import SparseTensor
from tinygrad_nv.quant.stack import QStack
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import (
    Element,
    QType,
    Scale,
    per_block_scale,
    per_channel_scale,
    per_group_scale,
    per_tensor_scale,
)

__all__ = ["Element", "QStack", "QTensor", "QType", "Scale", "SparseTensor", "per_block_scale",
           "per_channel_scale", "per_group_scale", "per_tensor_scale"]
