"""Matmuls with mma.sync: sm_80 and later, any strides.

  kernel.py    Matrix products with mma.sync: a ring of cp.async stages, fragments by ldmatrix. For sm_80 …
  legality.py  What `gemm_mma` asks of a schedule
"""
