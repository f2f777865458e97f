"""Low-rank adapters (LoRA, arXiv 2106.09685): what each adapter of a batch adds to a linear layer.

  spec.py        shrink (x Aᵀ) and expand (… Bᵀ), of rows that have an adapter each
  reference.py   the same in plain tinygrad
  kernel.py      expand with mma.sync
  templates.py   its schedule, legality, cost, record; shrink is a grouped matmul on GPUs (tile/grouped_gemm)
"""
