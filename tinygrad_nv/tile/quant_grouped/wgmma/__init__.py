"""Grouped matmuls with quantised matrices by wgmma: sm_90a.

  plan.py      the numbers of a spec and a schedule, which schedules there can be, those to try first
  kernel.py    grouped_gemm/wgmma's kernel with the main loop of quant_gemm/wgmma
"""
