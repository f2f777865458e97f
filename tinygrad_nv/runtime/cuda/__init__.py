"""NVIDIA's driver through cuda-python: the driver interface, and DEV=CUDA.

  api.py         the driver library: what is missing, versions, errors
  context.py     the primary context, its objects and streams
  driver.py      the driver interface on cuda.bindings
  device.py      `DEV=CUDA`: a GPU as a tinygrad device
  code.py        modules, functions and launches
  streams.py     streams and events
  graph.py       graphs
  memory.py      a pool, page-locked memory, and copies from pageable memory
  tensor_map.py  tensor maps by cuTensorMapEncodeTiled and …Im2col
  nvrtc.py       tinygrad's CUDA C renderer, compiled by NVRTC
"""
