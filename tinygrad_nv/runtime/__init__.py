"""The driver interface, and tinygrad devices over it.

  driver.py       the driver interface; capture.py: streams that record graphs
  emulated/       the driver interface over the emulator
  cuda/           the driver interface over cuda-python; DEV=CUDA; NVRTC
  device.py       one tinygrad device over the driver interface: DEV=EMU; its program.py, graph.py
  edges.py        graph edges: which order anything, and which are programmatic (PDL)
  renderers.py    which renderer a device has; ptx_renderer.py: tinygrad's PTX for such devices
  together.py     kernels that several devices run together; all_reduce.py: the memory they share
  note.py         launch settings of a kernel and facts for explain(), in tinygrad's graph
  l2.py           L2 persistence
  memory_pool.py  allocations by label, and the limit
  memory.py       bytes into device tensors without a second copy
  programs.py     the disk cache of compiled programs
  cpu/            the CPU device: its compiler, threads, launches, graphs
  observe/        timelines, ranges, predictions, telemetry, the memory report
"""
