"""Imports every part of bench/gpu/run.py, which registers them, in the order in which they run."""
from importlib import import_module

for each in ("smoke", "correct", "chains", "gemm", "quant", "moe", "attention", "backward", "paged",
             "elementwise", "all_reduce", "train", "conv", "tile_language"):
    import_module(f"bench.gpu.{each}")
for each in ("decode", "step"): import_module(f"bench.gpu.{each}")  # last: a row takes minutes
