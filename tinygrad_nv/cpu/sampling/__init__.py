"""Kernels of the sampler on a CPU (tile/sampling/spec.py).

  choice.py     chooses tokens: noise by Threefry, and the argmax, in vectors
  threshold.py  top-k and top-p filters by radix selection
"""
