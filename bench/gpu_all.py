"""Imports every part of bench/gpu.py, which registers them, in the order in which they run."""
import gpu_correct  # noqa: F401
