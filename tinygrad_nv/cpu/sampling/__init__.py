"""Kernels of the sampler on a CPU (tile/sampling/spec.py).

  threshold.py  top-p filters by radix selection
"""
