"""The Tile IR in PTX: a program of the tile language as a kernel for sm_80, sm_89 and sm_90a.

Protocol: `problems(program, schedule, gpu)` says in words what cannot be; `build(program, schedule, gpu)` is
the `TileKernel`, whose parameters are the program's tensors in their order. Its passes, `PASSES`:

  check.py       what no kernel can be
  sides.py       dots whose operands change sides
  assign.py      layouts of a program's tiles; layout.py: which thread holds which elements, and those beyond
                 a tile; dots.py: how each dot is computed
  produced.py    roles: which loops a producer fills
  pipelining.py  stages of loops
  registers.py   registers of threads and of tiles
  kernel.py      the table, and the PTX; show.py: what the passes print

What the PTX is made of, in this order:

  held.py        tiles in registers; elements.py: operations on their elements; threads.py: a thread's place
  arena.py       shared memory, and the barriers between its accesses
  convert.py     from one layout to another
  values.py      values while a kernel is written: the base of the following
  access.py, blocks.py, memory.py     loads, stores, atomics
  swaps.py                            between two threads; wider vectors, within warps
  collective.py, sorting.py           reductions and scans; sorts and gathers
  staged.py, dot.py, fma.py, wgmma.py    operands in shared memory; products
  control.py     loops and branches, sums that a loop adds up in parts
  pipelines.py                        operands that are copied ahead, by cp.async
  specialised.py                      or by a producer warp, with TMA; consumer.py: loops of the warps that
                                      read
"""
from tinygrad_nv.tile.language.gpu.kernel import build, problems

__all__ = ["build", "problems"]
