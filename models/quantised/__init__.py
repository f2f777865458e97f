"""Quantised and sparse layers of a network: which they are, and how they get there from a checkpoint.

  layers.py         which layers, by the reader of the config's `quantization`, and how one is filled
  experts.py        those of experts, which are stacks
  sparse.py         2:4 sparse layers
  repacked.py       layers in the order of kernels, kept on disk: repack_file.py, repack_folder.py

Beside it: `tinygrad_nv/quant/` has the types of matrices, what they are in memory and in files of every
format, and knows no model; `tinygrad_nv/quantize/` makes quantised checkpoints of a model.
"""
