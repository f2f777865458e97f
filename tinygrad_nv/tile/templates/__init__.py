"""Kernel families: each makes PTX from a spec and a schedule, for the architectures it names.

  gemm_mma.py    mma.sync with a ring of cp.async stages: sm_80 and later, any strides
  gemm_wgmma.py  wgmma with TMA and warp specialisation: sm_90a
  gemv.py        few rows: every byte of the weights once, at the speed of memory
"""
