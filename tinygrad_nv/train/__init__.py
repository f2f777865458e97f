"""Training: what `tinygrad-nv train` is made of.

  data/    Records, tokens and batches
"""
