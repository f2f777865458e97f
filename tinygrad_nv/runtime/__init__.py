"""What stands between tinygrad and a device.

  driver.py        what a GPU driver must do for us; capture.py: streams that record graphs
  emulated/        that, with the emulator as the device
  cuda/            that, on cuda-python; device.py there is DEV=CUDA, nvrtc.py its CUDA C
  device.py        one tinygrad device over the driver: DEV=EMU; its allocator.py, program.py, graph.py
  edges.py         which nodes of a graph another follows, and which it may overlap
  renderers.py     which renderer a device has; ptx_renderer.py: PTX for such devices
  note.py          what tinygrad's graph has of a kernel besides its text: how it is launched, its note
  l2.py            what launches keep in L2
  memory_pool.py   who holds a device's memory, and the limit
  memory.py        bytes into device tensors without a second copy
  programs.py      compiled programs kept from one process to the next
  cpu/             the CPU device: its compiler, threads, launches, graphs
  observe/         what a run shows: timelines, ranges, predictions, telemetry
"""
