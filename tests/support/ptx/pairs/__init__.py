"""Kernels with bugs, each beside its cure: what the emulator's checks are measured by."""
from __future__ import annotations

from . import block, bulk, clusters, copies, grid, proxies, rings, staged
from .table import SEEDS, rows, table
from .template import Kernel, assembles, points, run

PARTS = (rings, staged, bulk, copies, proxies, block, grid, clusters)
ALL: list[Kernel] = [case for part in PARTS for case in part.KERNELS]
PAIRS = [(case, bug) for case in ALL for bug in case.bugs]
__all__ = ["ALL", "PAIRS", "SEEDS", "Kernel", "assembles", "points", "rows", "run", "table"]
