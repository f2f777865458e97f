"""Steps on the device: captured graphs over pages, and the sampler.

  graphs.py   A step as graphs of the device, captured once and launched without tinygrad
  inputs.py   What a step is given: shapes of steps, and the words that reach the device in one upload
  outputs.py  What a step leaves on the device, and how the host comes to know it
  pages.py    What a model's keys and values are stored in
  runner.py   The device's side of serving: batches of many sequences as captured steps over pages
  sampler.py  The sampler as tensor code, for rows of logits
"""
