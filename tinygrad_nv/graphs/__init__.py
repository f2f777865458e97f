"""Steps of a model as graphs of the device, one for each size of a batch.

Read in this order:
  pool.py   `GraphPool`: which graph serves a call, and what it costs
"""
