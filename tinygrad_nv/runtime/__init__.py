"""What stands between tinygrad and a device.

Read in this order:
  cpu_device.py  what the CPU device has of ours; clang.py: its renderer with the compiler that toolchain.py
                finds; cpu_threads.py: how many threads there are
  programs.py   compiled programs kept from one process to the next
  cpu_pool.py   threads that run kernels on the CPU; cpu_eager.py: launches; cpu_graph.py: captured graphs, in
                one call; cpu_program.py: a kernel by itself; cpu_memory.py: large buffers
  driver.py     what a GPU driver must do for us; capture.py: streams that record graphs
  emulated.py   that, with the emulator as the device; emulated_graph.py: its streams and graphs;
                emulated_order.py: what is ordered, emulated_host.py: page-locked memory
  cuda.py       that, on cuda-python; its parts: cuda_api.py (versions, errors), cuda_context.py (calls),
                cuda_memory.py, cuda_code.py, cuda_order.py, cuda_graph.py, cuda_map.py
  ptx_renderer.py  PTX for such devices
  note.py       what is known of a kernel in tinygrad's graph
  launch_text.py   what a launch has besides: comments at the head of PTX
  device.py     one tinygrad device over the driver: DEV=EMU; its driven.py (what the others use of it),
                allocator.py, program.py, graph.py
  edges.py      which nodes of a graph another follows, and which it may overlap
  cuda_device.py   the same over NVIDIA's driver (cuda.py): DEV=CUDA; nvrtc.py: its CUDA C
  l2.py         what launches keep in L2
  clock.py      a product's kernel, timed
  memory_pool.py   who holds a device's memory, and the limit; memory_report.py: what is said of it
  memory.py     bytes into device tensors without a second copy
"""
