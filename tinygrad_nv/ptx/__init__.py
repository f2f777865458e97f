"""PTX: instructions, and what turns them into machine code.

Read in this order:
  syntax.py       modules, functions, instructions and operands
  tokens.py       words of the text, and a cursor over them
  expressions.py  constant expressions
  parser.py       PTX text → `Module`
  assemble.py     PTX text → cubin, with registers, spills and SASS counts

Nothing here knows of tinygrad or of tiles.
"""
