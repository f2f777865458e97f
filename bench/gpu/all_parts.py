"""Imports every part of bench/gpu.py, which registers them, in the order in which they run."""
from importlib import import_module

for each in ("gpu_smoke", "gpu_correct", "gpu_chains", "gpu_gemm", "gpu_quant", "gpu_moe", "gpu_attention",
             "gpu_backward", "gpu_paged", "gpu_elementwise", "gpu_all_reduce", "gpu_train", "gpu_conv",
             "gpu_language"):
    import_module(each)
for each in ("gpu_decode", "gpu_step"): import_module(each)  # last: a row takes minutes
