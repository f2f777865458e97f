"""Steps of a model as graphs of the device, one for each size of a batch.

Read in this order:
  pool.py     `GraphPool`: which graph serves a call, and what it costs
  inputs.py   `Input`, and how inputs reach the device
  capture.py  a step, recorded and compiled
  bucket.py   the graph of one size, and the memory that all sizes share
  stats.py    what `GraphPool.stats()` says
  progress.py a bar while graphs are made ahead
"""
from tinygrad_nv.graphs.inputs import Input
from tinygrad_nv.graphs.pool import GraphPool
from tinygrad_nv.graphs.stats import BucketStats, PoolStats

__all__ = ["BucketStats", "GraphPool", "Input", "PoolStats"]
