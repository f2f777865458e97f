"""Steps on the device: captured graphs over pages, and the sampler.

  runner.py   the device's side: batches of many sequences as captured steps over pages
  inputs.py   inputs of a step: shapes, and one upload for all of them
  outputs.py  results of a step, and how they reach the host
  pages.py    pages of keys and values on the device and on the host, and copies between them
  graphs.py   a step as graphs of the device, captured once and launched without tinygrad
  sampler.py  the sampler as tensor code, over rows of logits
"""
