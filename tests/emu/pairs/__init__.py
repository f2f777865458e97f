"""Kernels with bugs, each beside its cure: what the emulator's checks are measured by."""
from __future__ import annotations

from .rings import KERNELS as RINGS
from .template import Kernel, Outcome, assembles, points, run

ALL = [*RINGS]
__all__ = ["ALL", "Kernel", "Outcome", "assembles", "points", "run"]
