"""Kernels of the sampler, as named functions.

  named.py  reference implementations in tinygrad, and kernels
"""
