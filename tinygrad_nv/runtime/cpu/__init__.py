"""Kernels on the CPU: compiled, loaded, launched on threads, captured in graphs.

  clang.py    tinygrad's renderer for the CPU, with the compiler that toolchain.py finds
  device.py   what the CPU device gets: the compiler, graphs, all cores, huge pages; queues at their first use
  available.py  the cores of this process, and why not more
  threads.py  how many threads kernels are made for
  program.py  one kernel: compiled, loaded and called on arrays, for tuning and tests
  pool.py     the threads that run kernels, and the C that gives them their parts
  arguments.py  how many arguments a launch has room for
  graph.py    a captured graph: all launches of a TinyJit batch in one call into C
"""
