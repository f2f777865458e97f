"""NVIDIA's driver, through cuda-python: the driver interface, and DEV=CUDA.

  api.py         NVIDIA's driver library through cuda.bindings: what is missing, which versions, what its …
  code.py        Modules, functions and launches of the CUDA driver
  context.py     A GPU's primary context: calls of the driver in it, what they made, and its streams
  device.py      `DEV=CUDA`: a GPU as a device of tinygrad, through cuda-python
  driver.py      The driver interface for NVIDIA GPUs, on cuda.bindings
  graph.py       Graphs of the CUDA driver
  memory.py      Memory of a CUDA device: a pool, page-locked memory, and the way in for pageable bytes
  nvrtc.py       tinygrad's CUDA C renderer, compiled by NVRTC as cuda-python finds it (in a wheel or in a …
  streams.py     Streams and events of the CUDA driver
  tensor_map.py  Tensor maps by cuTensorMapEncodeTiled
"""
