"""Regions whose values are computed again for the backward pass, in place of being kept (arXiv 1604.06174).

Read in this order:
  values.py      the values of a region that a backward pass reads, their bytes and cost
  host.py        values that are on the host in between
  region.py      `checkpoint`: a function as a region
"""
from tinygrad_nv.train.regions.region import checkpoint
from tinygrad_nv.train.regions.values import POLICIES, Policy

__all__ = ["POLICIES", "Policy", "checkpoint"]
