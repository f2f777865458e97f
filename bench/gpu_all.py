"""Imports every part of bench/gpu.py, which registers them, in the order in which they run."""
from importlib import import_module

from gpu_parts import NO_CONTENDERS, Part, register

for each in ("gpu_correct", "gpu_gemm", "gpu_attention", "gpu_backward", "gpu_paged"): import_module(each)
register(Part("memory", "norms, rotary positions, activations, quantisation", absent=NO_CONTENDERS))
import_module("gpu_decode")  # last: a row takes minutes
