"""The tile language: a user's Python function as a kernel in whole tiles.

A function is read once for each set of shapes, dtypes and constants (program.py) and becomes a `Program` of
the Tile IR (ir.py), which the targets make kernels of: gpu/ as PTX, cpu/language/ as C. Read in this order:

  ir.py           values, operations, programs: the protocol of the IR; its text
  trace.py        writes operations as the function runs; errors at the user's line
  values.py       tiles with Python's operators; their dtypes and shapes
  bounds.py       what is known of integers
  memory.py       tensors, blocks, loads and stores, atomics
  elements.py, reductions.py, linear.py, attention.py   the functions of `tile`
  rounding.py                                           Philox, what policies say of stores
  control.py      loops and branches; source.py: a function's statements become calls of these, returns.py
                  gives it one end
  roles.py        which part of a kernel brings tiles, and which computes with them
  context.py      the program's place in the result; schedule.py: sizes of blocks
  passes.py       the steps to a kernel, by name, and what each has made
  program.py      a function and its arguments become a program: the passes of the frontend
  masks.py        loops end where a mask leaves nothing; unmasked.py: the proof
  promises.py     ranges of tiles that are looked at while a kernel is debugged
  interpret.py    runs a program in NumPy: what every target is held to
"""
