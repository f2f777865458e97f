"""Updates of many parameters in one launch, on a CPU.

  adamw.py    AdamW in place
  squares.py  sums of squares of chunks
  table.py    the table of tensors and chunks that both walk
"""
