"""CUDA graphs of a model's step, one for each batch size.

Read in this order:

  pool.py      `GraphPool`: which graph serves a call, and what it costs
  inputs.py    `Input`, and how inputs reach the device
  capture.py   a step, captured and compiled
  bucket.py    the graph of one batch size, and the arena that all share
  stats.py     the result of `GraphPool.stats()`
  progress.py  a progress bar for captures ahead of time
"""
from tinygrad_nv.graphs.inputs import Input
from tinygrad_nv.graphs.pool import GraphPool
from tinygrad_nv.graphs.stats import BucketStats, PoolStats

__all__ = ["BucketStats", "GraphPool", "Input", "PoolStats"]
