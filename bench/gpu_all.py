"""Imports every part of bench/gpu.py, which registers them, in the order in which they run."""
import gpu_correct  # noqa: F401
import gpu_gemm  # noqa: F401
from gpu_parts import NO_TEMPLATE, Part, register

register(Part("attention", "prefill and decode attention", absent=NO_TEMPLATE))
register(Part("memory", "norms, rotary positions, activations, quantisation", absent=NO_TEMPLATE))

import gpu_decode  # noqa: E402, F401 (runs last: a row takes minutes)
