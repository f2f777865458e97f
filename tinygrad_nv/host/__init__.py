"""Compiled CUDA programs on the emulated GPU: `tinygrad-nv ptx run`.

Read in this order:

  server.py     `run_program`: starts the program, and serves its calls
  csrc/host.c   what is in the program: redirects CUDA's functions to the server
  wire.py       the server's end of that connection
  library.py    compiles the C, and stubs of NVIDIA's libraries; names.txt lists CUDA's functions
  api.py        how a call finds its handler: calls_*.py
  session.py    the state that handlers share: memory.py, modules.py and fatbin.py, launches.py, gpus.py
  command.py    the command line

Nothing of NVIDIA's runtime or driver runs: the functions of the runtime are redirected too, also where it is
linked into the program, which is nvcc's default.
"""
from tinygrad_nv.host.launches import LaunchReport
from tinygrad_nv.host.server import Result, run_program

__all__ = ["LaunchReport", "Result", "run_program"]
