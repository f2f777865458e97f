"""Grouped matmuls with quantised matrices by wgmma: sm_90a.

  plan.py      the numbers of a spec and a schedule
  legality.py  what the template requires of a schedule
  defaults.py  tiles to try first
  kernel.py    grouped_gemm/wgmma's kernel with the main loop of quant_gemm/wgmma
"""
