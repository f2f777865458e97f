"""Regions whose values are computed again for the backward pass, in place of being kept (arXiv 1604.06174).

Read in this order:
  policy.py      what a region keeps: policies by name, and budgets
  values.py      the values of a region that a backward pass reads, their bytes and cost
  host.py        values that are on the host in between
  region.py      `checkpoint`: a function as a region
  blocks.py      the layers of a model as regions
"""
from tinygrad_nv.train.regions.policy import POLICIES, Policy
from tinygrad_nv.train.regions.region import checkpoint

__all__ = ["POLICIES", "Policy", "checkpoint"]
