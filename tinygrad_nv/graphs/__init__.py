"""Steps of a model as device graphs, one for each batch size.

Read in this order:
  pool.py     `GraphPool`: which graph serves a call
  inputs.py   `Input`, and how inputs reach the device
  capture.py  a step, recorded and compiled
  launches.py launches whose buffers lie elsewhere in each run, for torch.compile and ONNX
  bucket.py   the graph of one batch size, and the memory that all sizes share
  stats.py    what `GraphPool.stats()` reports
"""
from tinygrad_nv.graphs.inputs import Input
from tinygrad_nv.graphs.pool import GraphPool
from tinygrad_nv.graphs.stats import BucketStats, GraphPoolStats

__all__ = ["BucketStats", "GraphPool", "GraphPoolStats", "Input"]
