"""Kernels on the CPU: compiled, loaded, launched on threads, captured in graphs.

  clang.py    tinygrad's renderer for the CPU with a compiler that is looked for: explicit CC, clang in …
  eager.py    Launches on the CPU that no graph has: the parts of a kernel run on all cores
  graph.py    A captured graph on the CPU: all launches of a TinyJit batch in one call into C, parallel …
  memory.py   Memory of the CPU device: large buffers in huge pages
  pool.py     The threads that run kernels on the CPU, and the C that hands them their parts
  program.py  A kernel for the CPU by itself: compiled, loaded and called on arrays, for those who time or …
  queue.py    The four programs of tinygrad's queues on the CPU, made when somebody uses a queue
"""
