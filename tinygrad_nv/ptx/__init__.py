"""PTX: instructions, and what turns them into machine code.

Read in this order:
  syntax.py       modules, functions, instructions and operands
  tokens.py       words of the text, and a cursor over them
  expressions.py  constant expressions
  parser.py       PTX text → `Module`
  isa.py          the table of instructions, and checks against it (rows: isa_*.py)
  builder.py      kernels written in Python (parts: builder_*.py)
  assemble.py     PTX text → cubin, with registers, spills and SASS counts
  emulator/       a machine that runs PTX on a CPU and says what is wrong with it
  command.py      `tinygrad-nv ptx check` and `ptx stats`

Nothing here knows of tinygrad or of tiles.
"""
