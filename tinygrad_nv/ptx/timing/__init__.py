"""A timing model of NVIDIA's GPUs: kernels as the instructions they execute, and what those cost.

  listing.py    the instructions that ptxas makes of PTX, with their control bits and lines
  placement.py  the blocks of those instructions that the blocks of the PTX became
"""
