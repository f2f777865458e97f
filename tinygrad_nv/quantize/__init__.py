"""Making quantised checkpoints.

  schemes.py     the schemes there are, and what a config.json says of them
  rounding.py    scales of blocks of a matrix, and its codes
  compress.py    a matrix as the tensors of a format: compressed-tensors, AWQ, GPTQ, FP8 blocks
  files.py       safetensors files, written as their tensors are made
  directory.py   a whole model directory, shard by shard
"""
