"""Imports every part of bench/gpu.py, which registers them, in the order in which they run."""
import gpu_correct  # noqa: F401
import gpu_gemm  # noqa: F401
from gpu_parts import NO_CONTENDERS, Part, register

register(Part("attention", "prefill and decode attention", absent=NO_CONTENDERS))
register(Part("memory", "norms, rotary positions, activations, quantisation", absent=NO_CONTENDERS))

import gpu_decode  # noqa: E402, F401 (runs last: a row takes minutes)
