"""Programs of the tile language in C. Read in this order:

  views.py       tiles in memory
  text.py        lines of C
  emitter.py     values as C: variables, arrays, and what is computed where it is used
  columns.py     columns that are computed together: elements in turn, what is left out
  dot.py         products of tiles, by the blocked GEMM's packing and loop
  loops.py       loops and branches
  grouping.py    stores that are one loop
  statements.py  all other operations
  kernel.py      the passes, and the kernel; show.py: what they print
"""
