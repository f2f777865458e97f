"""PTX: the instruction table, a builder, a parser, an emulator and the assembler.

Read in this order:

  syntax.py       modules, functions, instructions and operands
  tokens.py       words of the text, and a cursor over them
  expressions.py  constant expressions; operands.py has the names of operands
  parser.py       PTX text → `Module`
  isa/            the table of instructions, and checks against it
  builder/        kernels written in Python
  assemble.py     PTX text → cubin, with registers, spills and SASS counts; sass.py reads the disassembly
  emulator/       the emulated GPU: runs PTX on a CPU and reports its bugs
  timing/         how long a launch takes on a GPU, from the instructions that it executes
  gpcs.py         how many clusters a GPU has room for at once
  command.py      `tinygrad-nv ptx check`, `ptx time` and `ptx stats`

Nothing here knows of tinygrad or of tiles.
"""
