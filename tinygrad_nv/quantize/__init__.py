"""Making quantised checkpoints: `tinygrad-nv quantize`. What quantised matrices are, and how files hold them,
is quant/.

  schemes.py     the schemes there are, and what a config.json says of them
  rounding.py    scales of blocks of a matrix, and its codes
  compress.py    a matrix as the tensors of a format: compressed-tensors, AWQ, GPTQ, FP8 blocks
  files.py       safetensors files, written as their tensors are made
  directory.py   a whole model directory, shard by shard

and with a look at layers' inputs:

  text.py        text to calibrate and to evaluate with, as sequences of tokens
  network.py     the LLaMA family in NumPy, layer by layer
  calibrate.py   layers quantised one after the other, each with the inputs that it will have
  gptq.py        columns rounded in turn, those that are left make up for it
  smoothing.py   scales of inputs, folded into what makes them: AWQ, SmoothQuant

and afterwards:

  quality.py     perplexity, and how far a quantised copy is from its model
  report.py      that as text, JSON and a picture
"""
