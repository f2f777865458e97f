"""Limits of a GPU of each architecture."""
from __future__ import annotations

MOST = (1 << 31) - 1            # a grid's x; a coordinate of TMA; what kernels count in 32 bits
MOST_GRID = 65535              # a grid's y and z
SMEM_BYTES = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90a": 227 << 10}
