"""Parts of a sampler, as functions known by name.

  named.py  Parts of a sampler as functions known by name: bodies in tinygrad, and kernels
"""
