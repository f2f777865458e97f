"""Kernels of the sampler on a CPU (tile/sampling/spec.py).

  threshold.py  top-k and top-p filters by radix selection
"""
