"""Matmuls with mma.sync: sm_80 and later, any strides.

  cost.py      What `gemm_mma` takes
  defaults.py  mma.sync's tiles worth trying first: 128×256 and 256×128 with eight warps, 128×128 with …
  kernel.py    Matrix products with mma.sync: a ring of cp.async stages, fragments by ldmatrix. For sm_80 …
  legality.py  What `gemm_mma` asks of a schedule
  plan.py      What follows from a spec and a schedule of `gemm_mma`: tiles and counts. Numbers only
"""
